"""Scissorhands: drops the keys that past queries most often gave less than the mean weight.

The budget is the same for all layers. Among equal counts the newer key stays, on which the rule is silent.
"""

import jax.numpy as jnp

from certjax.eval.methods.history import past_sum
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top


def prepare(problem: Problem, rng):
    """How many past queries gave the key less than 1 / (keys that they had): float32 [G, n]."""

    def below_mean(weight, seen):
        return (seen & (weight * seen.sum().astype(jnp.float32) < 1)).astype(jnp.float32)

    return past_sum(problem, None, below_mean)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window, and for each query head the keys with the smallest counts. Bytes: rows read."""
    window = newest(problem)
    kept = top(-index[:, ::-1], beyond_window(problem, budget), ~window[:, ::-1])[:, ::-1]
    return attend_to(problem, query, kept | window)


METHOD = Method("scissorhands", "Scissorhands", "2305.17118", "eviction", prepare, attend, history=True)
