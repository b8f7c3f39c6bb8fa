"""Expected Attention: keeps the keys that Gaussian future queries are expected to attend, weighted by ‖v‖.

Mean μ and covariance Σ of the past queries before RoPE are turned by the mean rotation of the next positions (those of
the rotary table beyond the keys, at most 512). Score: softmax over keys of μ·k scale + kᵀΣk scale² / 2, times ‖v‖, mean
over the group.
"""

import jax.numpy as jnp

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, newest, oldest, softmax
from certjax.eval.methods.rotary import turn, turn_back
from certjax.eval.methods.selection import top

FUTURE = 512
SINKS = 4


def prepare(problem: Problem, rng):
    """The score, float32 [1, n]."""
    assert problem.past_queries is not None
    assert problem.past_positions is not None
    assert problem.cos is not None
    assert problem.sin is not None
    n, _ = problem.shape
    at = problem.past_positions
    plain = turn_back(problem.past_queries, problem.cos[at][:, None], problem.sin[at][:, None])
    cos, sin = (x[n : n + FUTURE].mean(0)[None, None] for x in (problem.cos, problem.sin))
    queries = turn(plain, cos, sin)  # turning is linear, so mean and covariance turn with them
    mean = queries.mean(0)
    spread = queries - mean[None]
    covariance = jnp.einsum("tgh,tgi->ghi", spread, spread) / max(spread.shape[0] - 1, 1)
    keys, values = problem.keys.astype(jnp.float32), problem.values.astype(jnp.float32)
    square = jnp.einsum("nh,ghi,ni->gn", keys, covariance, keys)
    score = (mean @ keys.T) * jnp.float32(problem.scale) + square * jnp.float32(problem.scale**2 / 2)
    expected = softmax(score, jnp.bool_(True)).mean(0, keepdims=True)
    return expected * jnp.sqrt((values * values).sum(-1))[None]


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """4 sinks, the window, and the keys with the largest score, one set for the group. Bytes: rows read."""
    certain = newest(problem) | oldest(problem, SINKS)
    return attend_to(problem, query, top(index, budget - certain.sum(), ~certain) | certain)


METHOD = Method(
    "expected_attention",
    "Expected Attention",
    "2510.00636",
    "eviction",
    prepare,
    attend,
    history=True,
    rotary=True,
)
