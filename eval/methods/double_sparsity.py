"""Double Sparsity: approximate scores on the channels that matter most, from a 4-bit copy of them.

Channels are ranked on the past queries, in place of a calibration text, by the mean of |q_c k_c| over all pairs, which
is mean |q_c| · mean |k_c|; one choice for the group, since the copy belongs to the kv head.
"""

import jax
import jax.numpy as jnp

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top

SHARE = 8  # one channel in so many
LEVELS = 15


def prepare(problem: Problem, rng):
    """(channels int32 [r], their keys rounded to 16 steps between a channel's minimum and maximum, float32 [n, r])."""
    assert problem.past_queries is not None
    keys = problem.keys.astype(jnp.float32)
    weight = jnp.abs(problem.past_queries).mean((0, 1)) * jnp.abs(keys).mean(0)
    _, channels = jax.lax.top_k(weight, max(problem.shape[1] // SHARE, 1))
    label = keys[:, channels]
    low, high = label.min(0, keepdims=True), label.max(0, keepdims=True)
    step = jnp.maximum(high - low, jnp.float32(1e-30)) / LEVELS
    return channels, low + jnp.round((label - low) / step) * step


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window, and for each query head the keys with the largest approximate score.

    Bytes: rows read, and half a byte a key and channel, once for the group.
    """
    channels, label = index
    window = newest(problem)
    best = top(query[:, channels] @ label.T, beyond_window(problem, budget), ~window)
    return attend_to(problem, query, best | window, index_bytes=label.size / 2)


METHOD = Method("double_sparsity", "Double Sparsity", "2408.07092", "selection", prepare, attend, history=True)
