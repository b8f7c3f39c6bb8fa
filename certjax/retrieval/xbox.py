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
    does not return from building NSG over one. To find copies among appended points, the bytes of all are kept from the
    first `append` on.
    """

    def __init__(self, library: Library, points: np.ndarray):
        self.library, self.points = library, np.array(points, np.float32)
        self._rebuild(largest_norm(self.points))

    def _rebuild(self, bound: float) -> None:
        self.bound = bound
        rows = self.points
        self.groups: list[list[int]] | None = None  # the points that each indexed one stands for; None for one each
        self.numbers: dict[bytes, int] | None = None  # of the indexed points, made when something is appended
        distinct, inverse = np.unique(self.points, axis=0, return_inverse=True)
        if len(distinct) < len(rows):
            order = np.argsort(inverse.ravel(), kind="stable")
            rows = distinct
            self.groups = [x.tolist() for x in np.split(order, np.bincount(inverse.ravel()).cumsum()[:-1])]
        self.size = len(rows)
        self.index = self.library.make(lift(rows, bound))

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        """See `Searcher`."""
        out = np.full((len(queries), k), -1, np.int32)
        finite = np.isfinite(queries).all(-1)  # FAISS finds nothing for the others, pipnn panics
        if finite.any():
            asked = lift_queries(queries[finite], self.bound)
            found = self.library.nearest(self.index, asked, min(k, self.size))
            out[finite] = oracles.clean(found, self.size, k)
        if self.groups is not None and self.size < len(self.points):
            for row in out:
                members = [m for i in row if i >= 0 for m in self.groups[i]][:k]
                row[:] = members + [-1] * (k - len(members))
        return out

    def append(self, points: np.ndarray) -> None:
        """See `Searcher`."""
        if not self.library.grows:
            raise NotImplementedError(
                f"{type(self.library).__name__} cannot grow: keep new keys in the window, or build the index again"
            )
        points = np.asarray(points, np.float32)
        first, largest = len(self.points), largest_norm(points)
        self.points = np.concatenate([self.points, points])
        if largest > self.bound:  # M grows geometrically, so this is rare
            self._rebuild(SLACK * largest)
            return
        new = self._group(first)
        if new and not self.library.add(self.index, lift(self.points[new], self.bound)):
            self._rebuild(self.bound)

    def _group(self, first: int) -> list[int]:
        """Puts points from `first` on into groups. Returns those that equal none before."""
        if self.groups is None:
            self.groups = [[i] for i in range(first)]
        if self.numbers is None:
            self.numbers = {self.points[group[0]].tobytes(): j for j, group in enumerate(self.groups)}
        new = []
        for i in range(first, len(self.points)):
            j = self.numbers.setdefault(self.points[i].tobytes(), len(self.groups))
            if j == len(self.groups):
                self.groups.append([])
                new.append(i)
            self.groups[j].append(i)
        self.size = len(self.groups)
        return new
