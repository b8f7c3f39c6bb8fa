"""PyramidKV: SnapKV's score, with a budget that falls linearly with the layer."""

import jax.numpy as jnp

from certjax.eval.methods import snapkv
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top

BETA = 20


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """As SnapKV, with max − (max − min) layer / (layers − 1) keys beside the window, rounded down.

    min = (B − w) / 20 and max = 2 (B − w) − min, so that the mean over layers is B − w; B − w itself for one layer.
    Bytes: rows read.
    """
    window = newest(problem)
    mean = beyond_window(problem, budget).astype(jnp.float32)
    least = mean / BETA
    most = 2 * mean - least
    depth = jnp.where(
        jnp.asarray(problem.layers) > 1, problem.layer / jnp.maximum(jnp.asarray(problem.layers) - 1, 1), 0.5
    )
    room = jnp.floor(most - (most - least) * depth.astype(jnp.float32) + 1e-3).astype(jnp.int32)
    return attend_to(problem, query, top(index, room, ~window) | window)


METHOD = Method(
    "pyramidkv", "PyramidKV", "2406.02069", "eviction", snapkv.prepare, attend, budget="layers", history=True
)
