"""Attention that past queries paid to the keys: what eviction rules keep as a running state.

The state of the papers runs over the whole prompt. A problem holds its last T queries only, and the state is computed
afresh from them, over keys that none of them evicted.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from certjax.eval.methods.protocol import Problem, scores, softmax


def past_sum(problem: Problem, last: int | None, statistic: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
    """Sum over past queries of a statistic of their attention weights.

    Args:
      problem: Problem with past queries.
      last: how many, the newest ones; None for all.
      statistic: from weights [G, n] and seen bool [1, n], the keys that the query had, to [G, n].

    Returns:
      float32 [G, n]. Cost: as many times the attention of a step.
    """
    assert problem.past_queries is not None
    assert problem.past_positions is not None
    start = 0 if last is None else -min(last, problem.past_queries.shape[0])
    queries, positions = problem.past_queries[start:], problem.past_positions[start:]
    place = jnp.arange(problem.shape[0])[None]
    problem_f32 = scores_in_float32(problem)

    def step(total, past):
        query, position = past
        seen = place <= position
        return total + statistic(softmax(scores(problem_f32, query), seen), seen), None

    zero = jnp.zeros((queries.shape[1], place.size), jnp.float32)
    return jax.lax.scan(step, zero, (queries.astype(jnp.float32), positions))[0]


def scores_in_float32(problem: Problem) -> Problem:
    """The problem with float32 keys, so that a loop converts them once."""
    return Problem(
        keys=problem.keys.astype(jnp.float32),
        values=problem.values,
        scale=problem.scale,
        window=problem.window,
        sinks=problem.sinks,
    )
