"""Tactic: keys sorted by cluster, and the prefix whose estimated softmax mass reaches p.

The weights along the order are modelled as a/x + b, through the means of two sampled stretches at 10 % and 60 %; the
first 2 % are exact. Stretches hold 1 % of the keys, at least 8; page and paper leave their lengths open.
"""

import jax.numpy as jnp

from certjax.eval.methods import clusterkv
from certjax.eval.methods.kmeans import cluster_keys, places
from certjax.eval.methods.protocol import Knob, Method, Outcome, Problem, attend_to, newest, number, row_bytes, scores


def prepare(problem: Problem, rng):
    """`Clusters` as ClusterKV's, without sinks."""
    count = max(problem.shape[0] // clusterkv.KEYS_PER_CLUSTER, 1)
    return cluster_keys(problem, count, 0, rng, cosine=True)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window and, for each query head, the shortest prefix of the order that brings the mass to p = budget.

    Bytes: rows read, key rows of the samples, centres in the cache's dtype, once for the group; a 4-byte index a key.
    """
    n, _ = problem.shape
    window = newest(problem)
    place = places(index, query)  # n for the window
    score = scores(problem, query)
    weight = jnp.exp(score - score.max(-1, keepdims=True))
    by_place = jnp.put_along_axis(jnp.zeros((place.shape[0], n + 1)), place, weight, -1, inplace=False)[:, :n]
    keys = max(n - problem.window - problem.sinks, 1)
    length = max(keys // 100, 8)
    head = min(max(keys // 50, 8), keys)
    x = jnp.arange(1, n + 1, dtype=jnp.float32)[None]
    near, far = (_stretch(by_place, keys, share, length) for share in (0.1, 0.6))
    mass = prefix_mass(by_place, x, head, keys, near, far)
    inside = jnp.where(window, weight, 0).sum(-1, keepdims=True)
    target = jnp.asarray(budget, jnp.float32) * (mass[:, -1:] + inside) - inside
    taken = jnp.where(target > 0, jnp.minimum((mass < target).sum(-1, keepdims=True) + 1, keys), 0)
    read = (place < taken) | window
    looked = (place < head) | _within(place, keys, 0.1, length) | _within(place, keys, 0.6, length)
    extra = (looked & ~window).any(0) & ~read.any(0)
    index_bytes = (index.size.size + number(extra)) * row_bytes(problem) + 4 * number(read & ~window)
    return attend_to(problem, query, read, index_bytes=index_bytes, score=score)


def prefix_mass(by_place, x, head, keys, near, far):
    """Estimated mass of the first x keys of the order: exact for the head, a/x + b ≥ 0 beyond, float32 [G, n]."""
    (x1, y1), (x2, y2) = near, far
    a = (y1 - y2) / (1 / x1 - 1 / x2)
    b = y1 - a / x1
    estimate = jnp.where(x <= head, by_place, jnp.maximum(a / x + b, 0))
    return jnp.cumsum(jnp.where(x <= keys, estimate, 0), -1)


def _start(keys, share, length):
    return min(int(share * keys), max(keys - length, 0))


def _stretch(by_place, keys, share, length):
    """(middle of the stretch, its mean weight [G, 1])."""
    start = _start(keys, share, length)
    return start + (length + 1) / 2, by_place[:, start : start + length].mean(-1, keepdims=True)


def _within(place, keys, share, length):
    start = _start(keys, share, length)
    return (place >= start) & (place < start + length)


METHOD = Method(
    "tactic", "Tactic", "2502.12216", "selection", prepare, attend, budget="none", knob=Knob("p", 0.05, 0.9999)
)
