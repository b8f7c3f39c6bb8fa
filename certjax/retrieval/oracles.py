"""Oracles: an index over some keys that answers top-k inner-product queries. The protocol, and the exact one.

An oracle is a frozen description; `build` makes the index, a searcher. What a searcher returns is taken on trust: keys
that it misses are missing from the answer, and no strategy notices. Only `certjax.decode_attention` bounds the error of
what it did not read.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np


class Searcher(Protocol):
    """An index over n points."""

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        """int32 [G, k], numbers of the points with the largest inner products with queries [G, D], −1 where
        none; the row of a query that is not finite may hold any numbers, or −1. k ≥ 1.
        """
        ...

    def append(self, points: np.ndarray) -> None:
        """Adds points [m, D] in place, numbered on from n.

        Raises:
          NotImplementedError: the index cannot grow.
        """
        ...


class Oracle(Protocol):
    """How to build an index."""

    def build(self, points: np.ndarray, queries: np.ndarray | None = None) -> Searcher:
        """An index over points [n, D], float32, n ≥ 1; `queries` [m, D] are what it may be trained on."""
        ...


@dataclasses.dataclass(frozen=True)
class Flat:
    """Every inner product: exact, n D multiplications a query, no index.

    The one oracle whose search is jnp: strategies that ask one index (all but the buckets) then run on every platform,
    without a call to the host.
    """

    def build(self, points: np.ndarray, queries: np.ndarray | None = None) -> Searcher:
        """See `Oracle`; nothing is trained."""
        del queries
        return _FlatSearcher(np.array(points, np.float32))


class _FlatSearcher:
    def __init__(self, points: np.ndarray):
        self.points = points

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        return best(queries @ self.points.T, np.arange(len(self.points)), k)

    def append(self, points: np.ndarray) -> None:
        self.points = np.concatenate([self.points, points])


def search(points: jax.Array, queries: jax.Array, k: int) -> jax.Array:
    """The search of `Flat` in jnp: points [n, D], queries [G, D] to int32 [G, k], best first, −1 beyond n."""
    scores = jnp.einsum("gd,nd->gn", queries, points, preferred_element_type=jnp.float32)
    ids = jax.lax.top_k(scores, min(k, points.shape[0]))[1]
    return jnp.pad(ids, ((0, 0), (0, k - ids.shape[1])), constant_values=-1)


def best(scores: np.ndarray, ids: np.ndarray, k: int) -> np.ndarray:
    """`ids` [n] of the k largest of scores [G, n], best first: int32 [G, k], −1 beyond n."""
    out = np.full((len(scores), k), -1, np.int32)
    m = min(k, scores.shape[1])
    if m:
        place = np.argpartition(-scores, m - 1, axis=1)[:, :m]
        order = np.argsort(-np.take_along_axis(scores, place, 1), axis=1, kind="stable")
        out[:, :m] = ids[np.take_along_axis(place, order, 1)]
    return out


def clean(ids: np.ndarray, size: int, k: int) -> np.ndarray:
    """What a library returned, as int32 [G, k]: −1 for what is out of range, repeated or not there."""
    out = np.full((len(ids), k), -1, np.int32)
    for row, found in zip(out, np.asarray(ids, np.int64), strict=True):
        found = found[(found >= 0) & (found < size)]
        first = np.sort(np.unique(found, return_index=True)[1])[:k]
        row[: len(first)] = found[first]
    return out
