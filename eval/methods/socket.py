"""SOCKET: hash tables in which the query has a probability for every bucket, and a key the one bucket of its signs.

Score of a key: Σ over tables of the probability of its bucket, times ‖v‖. As in the published code the probabilities
are a softmax over the corners c ∈ {±1}^P of Σ_p c_p tanh(plane_p · q) / (√H τ), a product of P logistic functions;
P = 10, 60 tables, τ = 0.5.
"""

import jax
import jax.numpy as jnp

from certjax.eval.methods.hashes import buckets, draw_planes
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest, row_bytes
from certjax.eval.methods.selection import top

BITS = 10
TABLES = 60
TEMPERATURE = 0.5


def prepare(problem: Problem, rng):
    """(planes [L, P, H], buckets uint16 [L, n], ‖v‖ [1, n])."""
    values = problem.values.astype(jnp.float32)
    planes = draw_planes(rng, TABLES, BITS, problem.shape[1])
    return planes, buckets(planes, problem.keys.astype(jnp.float32)), jnp.sqrt((values * values).sum(-1))[None]


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window, and for each query head the keys with the largest score.

    Bytes: rows read; 600 bits of buckets and 2 bytes of norm a key, and the planes in the cache's dtype, once for the
    group.
    """
    planes, codes, norm = index
    window = newest(problem)
    best = top(bucket_mass(planes, codes, query) * norm, beyond_window(problem, budget), ~window)
    n, _ = problem.shape
    index_bytes = n * (planes.shape[0] * planes.shape[1] / 8 + 2) + planes[..., 0].size * row_bytes(problem)
    return attend_to(problem, query, best | window, index_bytes=index_bytes)


def bucket_mass(planes, codes, query):
    """Σ over tables of the query's probability for the key's bucket, float32 [G, n]."""
    bits = planes.shape[1]
    corner = (jnp.arange(2**bits)[:, None] >> jnp.arange(bits)[None]) & 1
    sign = corner.astype(jnp.float32) * 2 - 1  # [2^P, P], in the order of `buckets`
    factor = 1 / (query.shape[1] ** 0.5 * TEMPERATURE)

    def add(total, table):
        plane, code = table
        probability = jax.nn.softmax(jnp.tanh(query @ plane.T) @ sign.T * factor, axis=-1)
        return total + probability[:, code.astype(jnp.int32)], None

    zero = jnp.zeros((query.shape[0], codes.shape[1]), jnp.float32)
    return jax.lax.scan(add, zero, (planes, codes))[0]


METHOD = Method("socket", "SOCKET", "2602.06283", "selection", prepare, attend)
