"""ShadowKV: chunks of 8 keys ranked by their mean; keys of chosen chunks are rebuilt from a low-rank form before RoPE.

The paper decomposes the keys of all kv heads of a layer at rank 160 (of 1024). A problem holds one kv head: rank H / 2.
The chunks that their mean represents worst, by the smallest cosine, are kept as they are.
"""

import jax.numpy as jnp

from certjax.eval.methods.blocks import block_ids, block_sizes, in_blocks
from certjax.eval.methods.protocol import (
    Method,
    Outcome,
    Problem,
    attend_to,
    beyond_window,
    newest,
    number,
    row_bytes,
    scores,
    softmax,
)
from certjax.eval.methods.rotary import turn, turn_back
from certjax.eval.methods.selection import fill

CHUNK = 8
OUTLIERS = 48


def prepare(problem: Problem, rng):
    """(landmarks [C, H], smallest cosine of a chunk's keys with its landmark [C], rebuilt keys [n, H])."""
    n, H = problem.shape
    assert problem.cos is not None
    assert problem.sin is not None
    keys = problem.keys.astype(jnp.float32)
    chunks = in_blocks(problem, CHUNK, keys, 0.0)
    size = block_sizes(problem, CHUNK, jnp.ones((1, n), bool))[:, None]
    landmark = chunks.sum(1) / size.astype(jnp.float32)
    norm = lambda x: jnp.sqrt((x * x).sum(-1))
    cosine = (chunks * landmark[:, None]).sum(-1) / jnp.maximum(norm(chunks) * norm(landmark)[:, None], 1e-30)
    cosine = jnp.where(jnp.arange(CHUNK)[None] < size, cosine, 1.0).min(1)
    cos, sin = problem.cos[:n], problem.sin[:n]
    plain = turn_back(keys, cos, sin)
    _, vectors = jnp.linalg.eigh(plain.T @ plain)  # right singular vectors, ascending
    basis = vectors[:, ::-1][:, : rank(H)]
    return landmark, cosine, turn((plain @ basis) @ basis.T, cos, sin)


def rank(width: int) -> int:
    """Of the low-rank keys."""
    return max(width // 2, 1)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Outlier chunks, window, and the chunks with the largest landmark weight, the maximum over the group.

    Outliers: 48 chunks, at most a quarter of what the window leaves. Bytes: rows read, with H / 2 numbers in place of a
    rebuilt key, and landmarks and basis in the cache's dtype, once for the group.
    """
    landmark, cosine, rebuilt = index
    window = newest(problem)
    ids = block_ids(problem, CHUNK)
    room = beyond_window(problem, budget)
    sizes = block_sizes(problem, CHUNK, ~window)
    live = sizes[None] > 0
    reserved = jnp.minimum(OUTLIERS * CHUNK, room // 4)
    outlier = fill(jnp.where(live, -cosine[None], -jnp.inf), sizes, reserved)
    weight = softmax((query @ landmark.T) * jnp.float32(problem.scale), live).max(0, keepdims=True)
    left = room - jnp.where(outlier, sizes[None], 0).sum()
    chosen = fill(jnp.where(live & ~outlier, weight, -jnp.inf), sizes, left)
    true = outlier[:, ids] | window
    low_rank = chosen[:, ids] & ~window
    approximate = (query @ rebuilt.T) * jnp.float32(problem.scale)
    r, size = rank(problem.shape[1]), problem.keys.dtype.itemsize
    saved = number(low_rank & ~true) * (row_bytes(problem) - r * size)
    index_bytes = (sizes.size + r) * row_bytes(problem) - saved
    return attend_to(
        problem,
        query,
        true | low_rank,
        index_bytes=index_bytes,
        score=jnp.where(true, scores(problem, query), approximate),
    )


METHOD = Method("shadowkv", "ShadowKV", "2410.21465", "selection", prepare, attend, rotary=True)
