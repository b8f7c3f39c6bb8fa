"""SnapKV: the keys that the last queries of the prompt attended, pooled over neighbours; chosen once."""

import jax.numpy as jnp

from certjax.eval.methods.history import past_sum
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top

QUERIES = 64
KERNEL = 5


def prepare(problem: Problem, rng):
    """Attention of the last 64 queries, averaged over 5 neighbours (zeros beyond the ends) and the group: [1, n]."""
    total = past_sum(problem, QUERIES, lambda weight, seen: weight)
    return jnp.convolve(total.mean(0), jnp.full(KERNEL, 1 / KERNEL, jnp.float32), mode="same")[None]


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window and the keys with the largest score, one set for the group. Bytes: rows read."""
    window = newest(problem)
    return attend_to(problem, query, top(index, beyond_window(problem, budget), ~window) | window)


METHOD = Method("snapkv", "SnapKV", "2404.14469", "eviction", prepare, attend, history=True)
