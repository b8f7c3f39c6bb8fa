"""H2O: heavy hitters, the keys with the largest sum of past attention weights, and as many recent ones.

The sum runs over the past queries of the problem and not over the prompt; each query head keeps its own set.
"""

import jax.numpy as jnp

from certjax.eval.methods.history import past_sum
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, oldest
from certjax.eval.methods.selection import top


def prepare(problem: Problem, rng):
    """Column sums of the softmax weights, float32 [G, n]."""
    return past_sum(problem, None, lambda weight, seen: weight)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The newest half of the budget, no less than the window, and the heaviest of the other keys.

    Bytes: rows read; the sums are not needed to attend.
    """
    recent = jnp.maximum(problem.window, budget // 2)
    older = oldest(problem, problem.shape[0] - recent)
    return attend_to(problem, query, top(index, budget - recent, older) | ~older)


METHOD = Method("h2o", "H2O", "2306.14048", "eviction", prepare, attend, history=True)
