"""PQCache: product-quantised keys, two halves of 64 centres each, ranked by table look-up."""

import jax
import jax.numpy as jnp

from certjax.eval.methods.kmeans import kmeans
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
    softmax,
)
from certjax.eval.methods.selection import top

PARTS = 2
BITS = 6
SINKS = 32


def prepare(problem: Problem, rng):
    """(centres float32 [2, 64, H / 2], codes int32 [2, n]); the first 32 keys and the window train no centre."""
    use = ~newest(problem) & ~oldest(problem, SINKS)
    halves = jnp.stack(jnp.split(problem.keys.astype(jnp.float32), PARTS, -1))
    return jax.vmap(lambda half, key: kmeans(half, use, 2**BITS, key))(halves, jax.random.split(rng, PARTS))


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """Sinks, window, and the keys with the largest approximate softmax weight, summed over the group.

    Sinks: 32, at most a quarter of what the window leaves. Bytes: rows read, 12 bits a key and the centres in the
    cache's dtype, once for the group.
    """
    centres, codes = index
    halves = jnp.stack(jnp.split(query, PARTS, -1))
    table = jnp.einsum("pgd,pcd->pgc", halves, centres) * jnp.float32(problem.scale)
    score = sum(table[part][:, codes[part]] for part in range(PARTS))
    sinks = sink_count(problem, budget, SINKS)
    certain = newest(problem) | oldest(problem, sinks)
    weight = softmax(score, jnp.bool_(True)).sum(0, keepdims=True)
    read = top(weight, beyond_window(problem, budget) - sinks, ~certain) | certain
    index_bytes = codes.size * BITS / 8 + 2**BITS * row_bytes(problem)
    return attend_to(problem, query, read, index_bytes=index_bytes)


METHOD = Method("pqcache", "PQCache", "2407.12820", "selection", prepare, attend)
