"""Uniform sampling without replacement: the control for every claim about sampling."""

import jax
import jax.numpy as jnp

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest, nothing
from certjax.eval.methods.selection import top


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window exactly, and m of the N other keys, each with the weight N / m; one sample for the group.

    Numerator and denominator of the softmax are unbiased, their ratio is not. Bytes: rows read.
    """
    n, _ = problem.shape
    window = newest(problem)
    others = max(n - problem.window - problem.sinks, 0)
    size = jnp.minimum(beyond_window(problem, budget), others)
    sample = top(jax.random.uniform(rng, (1, n)), size, ~window)
    weight = jnp.where(window, 0, jnp.log(others / jnp.maximum(size, 1).astype(jnp.float32)))
    return attend_to(problem, query, sample | window, log_weight=weight)


METHOD = Method("uniform", "Uniform sampling", "", "sampling", nothing, attend)
