"""Knorm: keeps the keys with the smallest norm. No query is looked at."""

import jax.numpy as jnp

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top


def prepare(problem: Problem, rng):
    """−‖k‖², float32 [1, n]."""
    keys = problem.keys.astype(jnp.float32)
    return -(keys * keys).sum(-1)[None]


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window and the keys with the largest score, one set for the group. Bytes: rows read."""
    window = newest(problem)
    return attend_to(problem, query, top(index, beyond_window(problem, budget), ~window) | window)


METHOD = Method("knorm", "Knorm", "2406.11430", "eviction", prepare, attend)
