"""Oracle top-p: the smallest set of keys that holds a share p of the exact softmax mass. Its search is free."""

import jax.numpy as jnp

from certjax.eval.methods.protocol import Knob, Method, Outcome, Problem, attend_to, newest, nothing, scores, softmax
from certjax.eval.methods.selection import top_mass


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Window, whose mass counts, and the fewest keys that bring the mass to p = budget. Bytes: rows read."""
    score = scores(problem, query)
    window = newest(problem)
    weight = softmax(score, jnp.bool_(True))
    inside = jnp.where(window, weight, 0).sum(-1, keepdims=True)
    best = top_mass(weight, jnp.asarray(budget, jnp.float32) - inside, ~window)
    return attend_to(problem, query, best | window, score=score)


METHOD = Method(
    "oracle_topp", "Oracle top-p", "", "oracle", nothing, attend, budget="none", knob=Knob("p", 0.05, 0.9999)
)
