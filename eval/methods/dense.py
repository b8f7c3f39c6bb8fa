"""Dense attention: every key, once for the group."""

import jax.numpy as jnp

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, nothing


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Reads all keys, whatever the budget. Bytes: all rows, shared by the group."""
    return attend_to(problem, query, jnp.ones((1, problem.shape[0]), bool))


METHOD = Method("dense", "Dense", "", "oracle", nothing, attend, budget="none")
