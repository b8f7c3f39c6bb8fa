"""The whole certified step in jnp: `implementation="xla"`. The readable definition, and the oracle of the tests.

It reads every key and masks, so it is as slow as dense attention; what it reports as read is what an implementation
that skips would read. Cost: O(B N S H) plus O(B N S) per level evaluated; memory O(B N S).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from certjax import estimator, levels
from certjax.cache import from_storage
from certjax.certificate import TINY
from certjax.perturbation import exponentials
from certjax.quantization import from_bf16_bits, score_bounds
from certjax.types import BLOCK, Certificate, Config, Hint, KVCache


class State(NamedTuple):
    """Loop over levels; fields [B, K, G] unless said otherwise."""

    level: jax.Array
    running: jax.Array
    certified: jax.Array
    center: jax.Array  # ô − c0, [B, K, G, H]
    denominator: jax.Array
    bound: jax.Array
    scale_lower: jax.Array
    sufficient: jax.Array


def masks(cache: KVCache, config: Config) -> tuple[jax.Array, jax.Array]:
    """(pool, window), bool [B, 1, 1, S]: keys that may be sampled, and attended keys that are always read."""
    index = jnp.arange(cache.capacity)[None, :]
    length = cache.length[:, None]
    start = jnp.maximum(length - config.attention_span, 0) if config.attention_span else jnp.zeros_like(length)
    attended = (index >= start) & (index < length)
    end = jnp.minimum(length - config.window, length // BLOCK * BLOCK)
    pool = attended & (index >= config.sinks) & (index < end)
    return pool[:, None, None], (attended & ~pool)[:, None, None]


def exact_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """q·k in float32: [B, K, G, H] × [B, K, S, H] → [B, K, G, S]."""
    return jnp.einsum("bkgh,bksh->bkgs", query, key, precision="highest")


def dense(scores: jax.Array, attended: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Exact softmax attention over the attended keys.

    Returns:
      (output [B, K, G, H], log-normaliser [B, K, G], M² [B, K, G]); 0, −inf and 0 for rows without keys.
    """
    scores = jnp.where(attended, scores, -jnp.inf)
    top = scores.max(-1)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(scores - top[..., None])
    mass = estimator.total(weight)
    safe = jnp.maximum(mass, TINY)
    output = estimator.weighted_rows(weight, value) / safe[..., None]
    square = estimator.total(weight * (value * value).sum(-1)[:, :, None]) / safe
    return output, top + jnp.log(mass), square


@jax.jit  # one program outside jit too; inlined inside
def decode(
    query: jax.Array, cache: KVCache, words: jax.Array, config: Config, hint: Hint | None
) -> tuple[jax.Array, Certificate, Hint]:
    """One certified step.

    Args:
      query: float32 [B, K, G, H], multiplied by the softmax scale.
      cache: KVCache.
      words: uint32 [B, K, 4] (perturbation.py).
      config: Config.
      hint: fields [B, K, G], or None.

    Returns:
      (output float32 [B, K, G, H], Certificate [B, K, G], Hint [B, K, G]).
    """
    usable = jnp.broadcast_to((cache.valid & jnp.isfinite(query).all((1, 2, 3)))[:, None, None], query.shape[:3])
    query = jnp.where(usable[..., None], query, 0)
    pool, window = masks(cache, config)
    attended = pool | window
    # Rows beyond the length hold whatever was there: 0 · NaN is NaN, so they are zeroed, not only masked.
    clean = attended[:, :, 0, :, None] & cache.valid[:, None, None, None]
    key = jnp.where(clean, from_storage(cache.key, cache.dtype), 0)
    value = jnp.where(clean, from_storage(cache.value, cache.dtype), 0)
    raw = exact_scores(query, key)

    scores = _scores(query, cache, words, raw, pool, window)
    centered = value - cache.value_center[:, :, None]
    square = lambda x: (x * x).sum(-1)[:, :, None]
    values = levels.Values(
        centered,
        cache.value_center[:, :, None],
        square(centered),
        square(value),
        from_bf16_bits(cache.value_size)[:, :, None],
        from_bf16_bits(cache.value_norm)[:, :, None],
    )
    reference = raw[..., :1] - scores.exact[..., :1]  # c
    state, prediction, log_size, count = _run_levels(query, cache, config, hint, scores, values, usable)

    exact = ~state.certified
    nothing = jnp.zeros(query.shape), jnp.zeros(query.shape[:3]), jnp.zeros(query.shape[:3])
    exact_output, log_normalizer, scale_squared = jax.lax.cond(
        exact.any(), lambda: dense(raw, attended, value), lambda: nothing
    )
    output = jnp.where(exact[..., None], exact_output, state.center + cache.value_center[:, :, None])
    output = jnp.where(usable[..., None], output, jnp.nan)
    log_tau = estimator.log_threshold(state.level, prediction.mass, jnp.asarray(config.epsilon, jnp.float32))
    reads = _reads(cache, scores, log_size, log_tau, exact, count)
    bound = jnp.where(exact, 0, state.bound)
    sampled_normalizer = reference[..., 0] + jnp.log(jnp.maximum(state.denominator, TINY))
    result = Certificate(
        certified=usable,
        exact=exact & usable,
        error_bound=jnp.where(usable, bound, jnp.inf),
        level=jnp.where(exact, -1, state.level),
        threshold=jnp.where(exact, -jnp.inf, log_tau),
        **reads,
        log_normalizer=jnp.where(usable, jnp.where(exact, log_normalizer, sampled_normalizer), jnp.nan),
        value_scale_lower=jnp.where(usable, jnp.where(exact, jnp.sqrt(scale_squared), state.scale_lower), 0),
    )
    return output, result, Hint(level=state.sufficient)


def _scores(query, cache, words, raw, pool, window) -> estimator.Scores:
    estimate, half_width = score_bounds(query, cache)
    # A clipped block may have an infinite half-width: a candidate at every level, never a NaN.
    known = pool & jnp.isfinite(estimate)
    top = jnp.maximum(jnp.where(known, estimate, -jnp.inf).max(-1), jnp.where(window, raw, -jnp.inf).max(-1))
    c = jnp.where(jnp.isfinite(top), top, 0)[..., None]
    return estimator.Scores(
        exact=raw - c,
        estimate=jnp.where(known, estimate - c, -jnp.inf),
        half_width=jnp.where(known, half_width, jnp.inf),
        pool=pool,
        window=window,
        noise=exponentials(words, cache.capacity)[:, :, None],
    )


def _run_levels(query, cache, config, hint, scores, values, usable):
    """Runs levels until every head is certified or sent to dense."""
    epsilon, delta = (jnp.asarray(x, jnp.float32) for x in (config.epsilon, config.delta))
    shape = query.shape[:3]
    norm_size = config.measure != "denominator"
    prediction = estimator.predict(scores, values.size, values.norm, values.square, norm_size)
    log_size = jnp.zeros_like(scores.exact)  # z = w
    if norm_size:
        log_size = 0.5 * jnp.log(values.size**2 + prediction.offset[..., None] ** 2)
    pool_keys = jnp.broadcast_to(scores.pool.sum(-1), shape)
    count = estimator.level_count(pool_keys, epsilon)
    start = jnp.zeros(shape, jnp.int32)
    if hint is not None:
        wanted = jnp.where(jnp.isfinite(hint.level), jnp.round(hint.level - 1), 0)
        start = jnp.clip(wanted, 0, jnp.maximum(count - 1, 0).astype(jnp.float32)).astype(jnp.int32)
    rounding = _rounding(query, cache)
    budget = levels.Budget(
        tier="both" if config.bounds == "full" else "scalar",
        log_inverse=jnp.log(jnp.maximum(count, 1).astype(jnp.float32)) - jnp.log(delta),
        allowed=epsilon - rounding,
        rounding=rounding,
    )
    evaluate = levels.evaluate_output if norm_size else levels.evaluate_denominator

    def body(state: State) -> State:
        log_tau = estimator.log_threshold(state.level, prediction.mass, epsilon)
        drawn = estimator.sample(scores, log_size, log_tau)
        out = evaluate(config, budget, scores, values, prediction, log_size, log_tau, drawn)
        passed = state.running & (out.shortfall < 1) & (out.bound > 0) & jnp.isfinite(out.center).all(-1)
        # The level that would have been enough: the sample that is needed grows with the shortfall.
        needed = jnp.maximum(out.mass * out.shortfall, TINY) / estimator.first_size(epsilon)
        sufficient = estimator.LEVELS_PER_DOUBLING * jnp.log2(needed)
        # Small samples overstate the shortfall, so the jump is damped.
        jump = jnp.round(0.25 * estimator.LEVELS_PER_DOUBLING * jnp.log2(jnp.clip(out.shortfall, 1, 1e6)))
        next_level = state.level + jnp.maximum(jump, 1).astype(jnp.int32)
        too_many = (drawn.heavy | drawn.light).sum(-1) >= pool_keys // 2
        ended = passed | too_many | (next_level >= count)
        keep = lambda new, old: jnp.where(state.running.reshape(shape + (1,) * (new.ndim - 3)), new, old)
        return State(
            level=jnp.where(state.running & ~ended, next_level, state.level),
            running=state.running & ~ended,
            certified=state.certified | passed,
            center=keep(out.center, state.center),
            denominator=keep(out.denominator, state.denominator),
            bound=keep(out.bound, state.bound),
            scale_lower=keep(out.scale_lower, state.scale_lower),
            # After dense, try again a level below where it gave up.
            sufficient=keep(jnp.where(passed, sufficient, state.level.astype(jnp.float32)), state.sufficient),
        )

    zero = jnp.zeros(shape, jnp.float32)
    initial = State(
        level=start,
        running=usable & (count > 0) & (budget.allowed >= epsilon / 2),
        certified=jnp.zeros(shape, bool),
        center=jnp.zeros(query.shape, jnp.float32),
        denominator=zero,
        bound=zero,
        scale_lower=zero,
        sufficient=zero - 1,
    )
    state = jax.lax.while_loop(lambda state: state.running.any(), body, initial)
    return state, prediction, log_size, count


def _rounding(query: jax.Array, cache: KVCache) -> jax.Array:
    """Error of float32 arithmetic relative to M: (e^{2η} − 1) + sums, certificate.md 10; [B, K, G]."""
    H = query.shape[-1]
    products = jnp.sqrt((query * query).sum(-1)) * cache.key_norm_max[:, :, None]
    eta = 2.0**-24 * ((H + 4) * products + 96)
    accumulation = 2.0**-24 * 4 * (1024 + 64 + cache.capacity / 4096)
    return jnp.expm1(2 * eta) + accumulation


def _reads(cache, scores, log_size, log_tau, exact, count) -> dict[str, jax.Array]:
    """Counts at the last level; a row read for one head of a group serves all, so bytes are shared by the group."""
    H, G = cache.shape[-1], exact.shape[-1]
    drawn = estimator.sample(scores, log_size, log_tau)
    sampled = jnp.where(exact[..., None], scores.pool, drawn.heavy | drawn.light)
    looked = jnp.where(exact[..., None], scores.pool, estimator.candidates(scores, log_size, log_tau))
    row = H * cache.key.dtype.itemsize
    window_keys, pool_keys = (mask.sum(-1)[:, 0].astype(jnp.float32) for mask in (scores.window, scores.pool))  # [B, 1]
    rows = looked.any(2).sum(-1) + sampled.any(2).sum(-1)  # [B, K]
    scan = pool_keys * (H / 2 + 2 * H / BLOCK + 4.5)  # codes, scale and zero, two norms, a quarter of the third
    scan = jnp.where((count > 0).any(-1), scan, 0)
    group = rows.astype(jnp.float32) * row + 2 * row * window_keys + scan
    return {
        "keys_read": sampled.sum(-1).astype(jnp.int32),
        "candidates": looked.sum(-1).astype(jnp.int32),
        "bytes_read": jnp.broadcast_to((group / G)[..., None], exact.shape),
    }
