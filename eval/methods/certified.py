"""Certified attention, ours: `certjax.decode_attention` on a cache made of the problem."""

import dataclasses
import functools

import jax.numpy as jnp

import certjax
from certjax.eval.methods.protocol import Knob, Method, Outcome, Problem
from certjax.types import BLOCK

DELTA = 1e-3


def prepare(problem: Problem, rng):
    """A KVCache of one row and one kv head. The root mean square of past queries sharpens its score bounds."""
    n, H = problem.shape
    cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=H, capacity=n, dtype=problem.keys.dtype)
    past = problem.past_queries
    if past is not None:
        past = jnp.broadcast_to(jnp.sqrt((past**2).mean(0))[None, None], (1, n, *past.shape[1:]))
    return certjax.prefill(cache, problem.keys[None, :, None], problem.values[None, :, None], query=past)


def attend(problem: Problem, index, query, budget, rng, *, implementation=None, config=None) -> Outcome:
    """One step with ε = budget, from the first level (no hint).

    Keys: those of the certificate, and the keys that are always read (the window, and what does not fill a block).
    Bytes: those of the certificate.

    Args:
      problem: Problem.
      index: KVCache.
      query: float32 [G, H].
      budget: ε.
      rng: random key.
      implementation: as in `certjax.decode_attention`.
      config: Config, whose epsilon, window and scale are replaced; None for δ = 1e-3, always sampling.
    """
    config = certjax.Config(delta=DELTA, always_sample=True) if config is None else config
    config = dataclasses.replace(
        config, epsilon=budget, window=problem.window, sinks=problem.sinks, scale=problem.scale
    )
    result = certjax.decode_attention(query[None, None], index, rng=rng, config=config, implementation=implementation)
    proof = result.certificate
    n, _ = problem.shape
    pool = max(min(n - problem.window, n // BLOCK * BLOCK) - config.sinks, 0)
    return Outcome(
        output=result.output[0, 0],
        keys_read=proof.keys_read[0] + (n - pool),
        bytes_read=proof.bytes_read[0],
        log_normalizer=proof.log_normalizer[0],
    )


def with_options(implementation: str | None = None, config: "certjax.Config | None" = None) -> Method:
    """The method with another implementation or configuration, for callers that choose."""
    return dataclasses.replace(METHOD, attend=functools.partial(attend, implementation=implementation, config=config))


METHOD = Method(
    "certified",
    "Certified (certjax)",
    "",
    "certified",
    prepare,
    attend,
    budget="none",
    knob=Knob("epsilon", 0.5, 0.01),
)
