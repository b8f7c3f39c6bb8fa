"""MagicPIG: importance sampling by sign hashes. A key is read if it shares the query's bucket in at least two tables.

K = 10 bits a table, L tables; p = 1 − θ/π with θ the angle between q and k − mean key, x = p^K:

    u = 1 − (1 − x)^(L−1) (1 − x + L x),   weight exp(s) / u.

Numerator and denominator are unbiased over the hashes. The published code adds 1e-4 to u, which is not done here; the
variant with one collision and lifted norms is another estimator. No layer is dense.
"""

import jax
import jax.numpy as jnp

from certjax.eval.methods.hashes import buckets, draw_planes
from certjax.eval.methods.protocol import Knob, Method, Outcome, Problem, attend_to, newest, oldest, row_bytes, scores

BITS = 10
TABLES = 300  # at most; the knob says how many are used (paper: 150, 170, 300)
SINKS = 4


def prepare(problem: Problem, rng):
    """(planes [L, K, H], buckets of the centred keys uint16 [L, n], centred keys' mean [1, H], norms [1, n])."""
    keys = problem.keys.astype(jnp.float32)
    mean = keys.mean(0, keepdims=True)
    centred = keys - mean
    planes = draw_planes(rng, TABLES, BITS, keys.shape[1])
    return planes, buckets(planes, centred), mean, jnp.sqrt((centred * centred).sum(-1))[None]


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """4 sinks and the window exactly; of the others what collides twice in the first L = budget tables.

    Bytes: rows read; for each query head a 4-byte index a collision; the planes in the cache's dtype, once.
    """
    planes, codes, mean, norm = index
    tables = jnp.clip(jnp.asarray(budget, jnp.float32).astype(jnp.int32), 2, TABLES)
    hits = collisions(codes, buckets(planes, query), tables)
    certain = newest(problem) | oldest(problem, SINKS)
    score = scores(problem, query)
    inner = score / problem.scale - (query * mean).sum(-1, keepdims=True)
    length = norm * jnp.sqrt((query * query).sum(-1, keepdims=True))
    log_u = jnp.log(inclusion(inner / jnp.maximum(length, 1e-30), tables))
    index_bytes = 4 * jnp.where(certain, 0, hits).sum() + tables * (BITS * row_bytes(problem))
    return attend_to(
        problem,
        query,
        (hits >= 2) | certain,
        index_bytes=index_bytes.astype(jnp.float32),
        log_weight=jnp.where(certain, 0, -log_u),
        score=score,
    )


def collisions(codes, own, tables):
    """In how many of the first tables a key shares the bucket of each query head, int32 [G, n]."""

    def count(table, hits):
        return hits + (codes[table][None] == own[table][:, None]).astype(jnp.int32)

    return jax.lax.fori_loop(0, tables, count, jnp.zeros((own.shape[1], codes.shape[1]), jnp.int32))


def inclusion(cosine, tables):
    """U of the module, for the cosine of the angle between query and centred key."""
    p = 1 - jnp.arccos(jnp.clip(cosine, -1, 1)) / jnp.pi
    x = jnp.clip(p, 1e-3, 1 - 1e-6) ** BITS  # p = 0 never collides; u must not vanish
    others = (tables - 1).astype(jnp.float32)
    # 1 − x + L x = 1 + (L − 1) x; logarithms, since u of a far key is the difference of nearly equal numbers.
    return jnp.maximum(-jnp.expm1(others * jnp.log1p(-x) + jnp.log1p(others * x)), 1e-30)


METHOD = Method(
    "magicpig",
    "MagicPIG",
    "2410.16179",
    "sampling",
    prepare,
    attend,
    budget="none",
    knob=Knob("tables", 2, TABLES),
)
