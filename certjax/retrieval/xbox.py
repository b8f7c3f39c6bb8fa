"""Maximum inner product as nearest neighbour, exactly, for libraries whose indexes are sound for L2 alone.

With M ≥ every ‖x‖, the points (x, √(M² − ‖x‖²)) all have norm M, and ‖(q, 0) − x̃‖² = ‖q‖² + M² − 2 q·x: the order of
distances is that of inner products (Bachrach et al., "Speeding up the Xbox recommender system using a Euclidean
transformation for inner-product spaces", 2014, section 4.2). A graph over raw inner products is not navigable.
"""

from typing import Any, Protocol

import numpy as np

from certjax.retrieval import oracles

SLACK = 1.25  # of M over the largest norm after a rebuild, so that few appended keys need one


def lift(points: np.ndarray, bound: float) -> np.ndarray:
    """Points [n, D] of norms at most `bound` to float32 [n, D + 1]."""
    points = np.asarray(points, np.float64)
    rest = np.sqrt(np.maximum(bound**2 - (points**2).sum(-1, keepdims=True), 0))
    return np.concatenate([points, rest], -1).astype(np.float32)


def lift_queries(queries: np.ndarray, bound: float) -> np.ndarray:
    """Queries [G, D] to float32 [G, D + 1] of norm `bound`: their length does not matter to the order of the points,
    but does to the order of the means that a partition compares with first.
    """
    norm = np.linalg.norm(np.asarray(queries, np.float64), axis=-1, keepdims=True)
    scaled = queries * (bound / np.where(norm > 0, norm, 1))
    return np.concatenate([scaled, np.zeros_like(scaled[:, :1])], -1).astype(np.float32)


def largest_norm(points: np.ndarray) -> float:
    """M of points [n, D]; 1 where all are zero."""
    return float(np.linalg.norm(np.asarray(points, np.float64), axis=-1).max(initial=0)) or 1.0


class Library(Protocol):
    """What a library is asked to do with lifted points."""

    grows: bool  # False: appending is an error

    def make(self, points: np.ndarray) -> Any:
        """An index over points [n, D + 1], all different."""
        ...

    def nearest(self, index: Any, queries: np.ndarray, k: int) -> np.ndarray:
        """Numbers of the nearest points [G, k]; anything out of range where there is none."""
        ...

    def add(self, index: Any, points: np.ndarray) -> bool:
        """Adds points in place; False where that needs a new index."""
        ...


class LiftedSearcher:
    """A library's index as a `Searcher`.

    Equal points are indexed once: a graph whose links all lead to copies of the same point is not navigable, and FAISS
    does not return from building NSG over one.
    """

    def __init__(self, library: Library, points: np.ndarray):
        self.library, self.points = library, np.array(points, np.float32)
        self._rebuild(largest_norm(self.points))

    def _rebuild(self, bound: float) -> None:
        self.bound = bound
        rows, self.groups = self.points, None
        distinct, inverse = np.unique(self.points, axis=0, return_inverse=True)
        if len(distinct) < len(rows):
            order = np.argsort(inverse.ravel(), kind="stable")
            rows, self.groups = distinct, np.split(order, np.bincount(inverse.ravel()).cumsum()[:-1])
        self.size = len(rows)
        self.index = self.library.make(lift(rows, bound))

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        """See `Searcher`."""
        found = self.library.nearest(self.index, lift_queries(queries, self.bound), min(k, self.size))
        found = oracles.clean(found, self.size, k)
        if self.groups is not None:
            for row in found:
                members = np.concatenate([self.groups[i] for i in row if i >= 0] + [np.full(k, -1)])
                row[:] = members[:k]
        return found

    def append(self, points: np.ndarray) -> None:
        """See `Searcher`."""
        if not self.library.grows:
            raise NotImplementedError(
                f"{type(self.library).__name__} cannot grow: keep new keys in the window, or build the index again"
            )
        points = np.asarray(points, np.float32)
        largest = largest_norm(points)
        added = self.library.add(self.index, lift(points, self.bound)) if largest <= self.bound else False
        first = len(self.points)
        self.points = np.concatenate([self.points, points])
        if not added:  # M grows geometrically, so this is rare where the library can add
            self._rebuild(max(self.bound, SLACK * largest if largest > self.bound else 0))
            return
        self.size += len(points)
        if self.groups is not None:
            self.groups += [np.array([first + i]) for i in range(len(points))]
