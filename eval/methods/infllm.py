"""InfLLM: blocks of 128 keys, ranked by four representative keys each.

Representatives are the keys that local queries attended most. The queries at the time are gone: here the past queries
of the problem stand in for them. Block scores are summed over the group, so its heads read the same. Positions are
kept; the paper clamps those of retrieved blocks to the local distance.
"""

import jax
import jax.numpy as jnp

from certjax.eval.methods.blocks import block_ids, block_sizes, in_blocks
from certjax.eval.methods.history import past_sum
from certjax.eval.methods.protocol import (
    Method,
    Outcome,
    Problem,
    attend_to,
    beyond_window,
    newest,
    oldest,
    row_bytes,
    sink_count,
)
from certjax.eval.methods.selection import fill

BLOCK = 128
REPRESENTATIVES = 4
INITIAL = 128


def prepare(problem: Problem, rng):
    """Sum of the representative keys of every block, float32 [C, H]: q · rep is linear in it."""
    received = past_sum(problem, None, lambda weight, seen: weight).sum(0)
    _, best = jax.lax.top_k(in_blocks(problem, BLOCK, received, -1.0), REPRESENTATIVES)
    keys = in_blocks(problem, BLOCK, problem.keys.astype(jnp.float32), 0.0)
    return jnp.take_along_axis(keys, best[..., None], 1).sum(1)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Initial keys, the blocks with the largest Σ q · rep that fit whole, and the newest keys with what is left.

    Initial keys: 128, at most a quarter of what the window leaves. Bytes: rows read and four rows a block, once for
    the group.
    """
    initial = sink_count(problem, budget, INITIAL)
    certain = newest(problem) | oldest(problem, initial)
    sizes = block_sizes(problem, BLOCK, ~certain)
    score = jnp.where(sizes > 0, (query @ index.T).sum(0), -jnp.inf)[None]
    blocks = fill(score, sizes, beyond_window(problem, budget) - initial)
    read = blocks[:, block_ids(problem, BLOCK)] | certain
    return attend_to(
        problem,
        query,
        read | newest_unread(read, budget - read.sum()),
        index_bytes=float(REPRESENTATIVES * sizes.size * row_bytes(problem)),
    )


def newest_unread(read, count):
    """The newest `count` keys that are not read yet, bool [1, n]."""
    rest = ~read[:, ::-1]
    return (rest & (jnp.cumsum(rest, -1, dtype=jnp.int32) <= count))[:, ::-1]


METHOD = Method("infllm", "InfLLM", "2402.04617", "selection", prepare, attend, history=True)
