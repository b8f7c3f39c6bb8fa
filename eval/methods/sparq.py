"""SparQ: approximate scores on the query's largest channels, and the mean value for what is left out.

For a group, |q| is summed over its heads to choose channels and approximate weights are summed to choose keys, so all
heads read the same.
"""

import dataclasses

import jax
import jax.numpy as jnp

from certjax.eval.methods.protocol import (
    Method,
    Outcome,
    Problem,
    attend_to,
    beyond_window,
    newest,
    softmax,
)
from certjax.eval.methods.selection import top

SHARE = 4  # one channel in so many: r


def prepare(problem: Problem, rng):
    """Mean value v̄, float32 [1, H]; keys are held a second time by channel, so that r channels are r rows."""
    return problem.values.astype(jnp.float32).mean(0, keepdims=True)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Softmax ŝ of the products over r channels at the temperature √(d Σ_r |q| / Σ |q|); the keys with the largest ŝ
    and the window; output α o + (1 − α) v̄ with α = Σ ŝ of what was read.

    Bytes: rows read, r of the H channels of all keys, and v̄, once for the group.
    """
    n, H = problem.shape
    channels = max(H // SHARE, 1)
    _, largest = jax.lax.top_k(jnp.abs(query).sum(0), channels)
    part = query[:, largest]
    share = jnp.abs(part).sum(-1, keepdims=True) / jnp.maximum(jnp.abs(query).sum(-1, keepdims=True), 1e-30)
    score = part @ problem.keys[:, largest].astype(jnp.float32).T
    score = score * (problem.scale / jnp.sqrt(jnp.maximum(share, 1e-30)))
    approximate = softmax(score, jnp.bool_(True))
    window = newest(problem)
    read = top(approximate.sum(0, keepdims=True), beyond_window(problem, budget), ~window) | window
    index_bytes = (n * channels + H) * problem.keys.dtype.itemsize
    out = attend_to(problem, query, read, index_bytes=index_bytes)
    alpha = jnp.where(read, approximate, 0).sum(-1, keepdims=True)
    return dataclasses.replace(
        out,
        output=alpha * out.output + (1 - alpha) * index,
        log_normalizer=out.log_normalizer - jnp.log(jnp.maximum(alpha[:, 0], 1e-30)),
    )


METHOD = Method("sparq", "SparQ", "2312.04985", "selection", prepare, attend)
