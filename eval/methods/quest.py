"""Quest: pages of 16 keys, ranked by an upper bound of q · k from each channel's minimum and maximum."""

import jax.numpy as jnp

from certjax.eval.methods.blocks import block_ids, block_sizes, in_blocks
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest, row_bytes
from certjax.eval.methods.selection import fill

PAGE = 16


def prepare(problem: Problem, rng):
    """(m, M): the smallest and largest value of every channel of a page, float32 [C, H] each."""
    keys = problem.keys.astype(jnp.float32)
    return (
        in_blocks(problem, PAGE, keys, jnp.inf).min(1),
        in_blocks(problem, PAGE, keys, -jnp.inf).max(1),
    )


def page_scores(index, query):
    """Σ_c max(q_c m_c, q_c M_c), float32 [G, C]: the positive part of q takes M, the negative m."""
    low, high = index
    return jnp.maximum(query, 0) @ high.T + jnp.minimum(query, 0) @ low.T


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """For each query head the pages with the largest bound, as long as whole pages fit; the window in place of the
    newest page. A page that reaches into the window counts its other keys only.

    Bytes: rows read, and m and M of all pages in the cache's dtype, once for the group.
    """
    window = newest(problem)
    sizes = block_sizes(problem, PAGE, ~window)
    bound = jnp.where(sizes[None] > 0, page_scores(index, query), -jnp.inf)
    pages = fill(bound, sizes, beyond_window(problem, budget))
    read = pages[:, block_ids(problem, PAGE)] | window
    return attend_to(problem, query, read, index_bytes=2.0 * sizes.size * row_bytes(problem))


METHOD = Method("quest", "Quest", "2406.10774", "selection", prepare, attend)
