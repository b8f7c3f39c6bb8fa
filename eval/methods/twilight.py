"""Twilight: Quest chooses a quarter of the keys; of these the fewest that hold a share p of the mass, estimated from
4-bit keys, are read.
"""

import jax.numpy as jnp

from certjax.eval.methods import quest
from certjax.eval.methods.blocks import block_ids, block_sizes
from certjax.eval.methods.protocol import (
    Knob,
    Method,
    Outcome,
    Problem,
    attend_to,
    newest,
    number,
    row_bytes,
    softmax,
)
from certjax.eval.methods.selection import fill, top_mass

CANDIDATES = 4  # one key in so many
LEVELS = 15


def prepare(problem: Problem, rng):
    """(Quest's index, keys rounded to 16 steps between the key's own minimum and maximum, float32 [n, H])."""
    keys = problem.keys.astype(jnp.float32)
    low, high = keys.min(-1, keepdims=True), keys.max(-1, keepdims=True)
    step = jnp.maximum(high - low, 1e-30) / LEVELS
    return quest.prepare(problem, rng), low + jnp.round((keys - low) / step) * step


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window, and the fewest candidates that bring the estimated mass of window and candidates to p = budget.

    Bytes: rows read, Quest's metadata, and H / 2 + 4 bytes a candidate, once for the group.
    """
    n, H = problem.shape
    pages, coarse = index
    window = newest(problem)
    sizes = block_sizes(problem, quest.PAGE, ~window)
    bound = jnp.where(sizes[None] > 0, quest.page_scores(pages, query), -jnp.inf)
    candidates = fill(bound, sizes, n // CANDIDATES)[:, block_ids(problem, quest.PAGE)] & ~window
    weight = softmax((query @ coarse.T) * jnp.float32(problem.scale), candidates | window)
    inside = jnp.where(window, weight, 0).sum(-1, keepdims=True)
    best = top_mass(weight, jnp.asarray(budget, jnp.float32) - inside, candidates)
    index_bytes = 2.0 * sizes.size * row_bytes(problem) + number((candidates | window).any(0)) * (H / 2 + 4)
    return attend_to(problem, query, best | window, index_bytes=index_bytes)


METHOD = Method(
    "twilight",
    "Twilight (Quest)",
    "2502.02770",
    "selection",
    prepare,
    attend,
    budget="none",
    knob=Knob("p", 0.05, 0.9999),
)
