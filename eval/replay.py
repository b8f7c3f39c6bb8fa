"""Replays certified decode steps against dense attention on the same inputs."""

import jax
import jax.numpy as jnp

import certjax
from certjax import reference
from certjax.cache import from_storage


def audited_attention(query, cache, *, rng, hint, config):
    """A `DecodeAttention` that returns the certified result and, for every head, its observed error.

    The extra statistics, float32 [B, N]: `error_over_epsilon`, ‖ô − o‖ / (ε M) for the value measure, ‖ô − o‖ / (ε
    ‖o‖) for the output measure; `error_over_bound`, ‖ô − o‖ / error_bound. Both are 0 where the head is exact: its
    error is rounding. A value above 1 is a violation. Cost: certified plus dense attention in jnp.

    Raises:
      ValueError: the denominator measure, which does not bound the output.
    """
    if config.measure == "denominator":
        raise ValueError('measure must be "value" or "output": the denominator measure does not bound the output')
    result = certjax.decode_attention(query, cache, rng=rng, config=config, hint=hint)
    output, scale = dense_output(query, cache, config)
    error = jnp.sqrt(((result.output.astype(jnp.float32)[:, 0] - output) ** 2).sum(-1))
    if config.measure == "output":
        scale = jnp.sqrt((output**2).sum(-1))
    sampled = result.certificate.certified & ~result.certificate.exact
    over = lambda x: jnp.where(sampled, error / jnp.maximum(x, 1e-30), 0)
    extra = {
        "error_over_epsilon": over(config.epsilon * scale),
        "error_over_bound": over(result.certificate.error_bound),
    }
    return result, extra


def dense_output(query: jax.Array, cache: "certjax.KVCache", config: "certjax.Config") -> tuple[jax.Array, jax.Array]:
    """Dense attention in jnp: output float32 [B, N, H], and M [B, N] with M² = Σ a_i ‖v_i‖²."""
    B, K, _, H = cache.shape
    scale = H**-0.5 if config.scale is None else config.scale
    grouped = query.astype(jnp.float32).reshape(B, K, -1, H) * jnp.float32(scale)
    pool, window = reference.masks(cache, config)
    attended = pool | window
    key, value = (
        jnp.where(attended[:, :, 0, :, None], from_storage(x, cache.dtype), 0) for x in (cache.key, cache.value)
    )
    output, _, square = reference.dense(reference.exact_scores(grouped, key), attended, value)
    return output.reshape(B, -1, H), jnp.sqrt(square).reshape(B, -1)
