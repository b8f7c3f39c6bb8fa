"""The random-forest index MLANN: retrieval as classification, learnt from queries. Our own compact numpy version.

Approximate, and silent about what it misses: worst on queries unlike those it was trained on.
"""

import dataclasses

import numpy as np

from certjax.retrieval import oracles


@dataclasses.dataclass(frozen=True)
class MLANN:
    """Trees over *queries*: a leaf knows how often each point was a true neighbour of the training queries that fell
    into it, a query adds up the votes of its leaves, and the points with most votes are compared exactly.

    After Hyvönen, Jääskeläinen and Roos, "A multilabel classification framework for approximate nearest neighbor
    search", 2022. Not their library, and simpler: a node splits at the median of the coordinate that varies most
    among √D random ones. A query costs `trees` · `depth` comparisons, the votes, and `oversample` · k inner products;
    a build costs all inner products of points and training queries.

    Attributes:
      trees: independent trees.
      depth: largest depth; 2^depth leaves at most.
      neighbors: true neighbours of a training query.
      leaf: fewest training queries in a leaf.
      oversample: candidates compared exactly, as a multiple of k.
      seed: of the coordinates.
    """

    trees: int = 24
    depth: int = 12
    neighbors: int = 128
    leaf: int = 4
    oversample: int = 4
    seed: int = 0

    def build(self, points: np.ndarray, queries: np.ndarray | None = None) -> oracles.Searcher:
        """See `Oracle`.

        Raises:
          ValueError: there are no training queries.
        """
        if queries is None or not len(queries):
            raise ValueError("MLANN is trained on queries: pass queries [m, H] to build, those of the prompt say")
        return _ForestSearcher(self, np.array(points, np.float32), np.array(queries, np.float32))


class _ForestSearcher:
    def __init__(self, oracle: MLANN, points: np.ndarray, queries: np.ndarray):
        self.oracle, self.points, self.queries = oracle, points, queries
        scores = queries @ points.T
        m = min(oracle.neighbors, len(points))
        self.neighbors = np.argpartition(-scores, m - 1, axis=1)[:, :m]  # [queries, m]
        self.least = np.take_along_axis(scores, self.neighbors, 1).min(1)  # a point above it is a neighbour
        rng = np.random.default_rng(oracle.seed)
        self.trees = [_Tree(oracle, queries, rng) for _ in range(oracle.trees)]
        self.votes = [[self._count(self.neighbors[leaf], len(leaf)) for leaf in tree.leaves] for tree in self.trees]

    @staticmethod
    def _count(neighbors: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        ids, count = np.unique(neighbors, return_counts=True)
        return ids, count / size

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        out = np.full((len(queries), k), -1, np.int32)
        for row, query in zip(out, queries, strict=True):
            if not np.isfinite(query).all():
                continue
            votes = np.zeros(len(self.points))
            for tree, leaves in zip(self.trees, self.votes, strict=True):
                ids, share = leaves[tree.leaf_of(query)]
                votes[ids] += share
            m = min(self.oracle.oversample * k, int((votes > 0).sum()))
            candidates = np.argpartition(-votes, m - 1)[:m]
            row[:] = oracles.best((self.points[candidates] @ query)[None], candidates, k)[0]
        return out

    def append(self, points: np.ndarray) -> None:
        """The trees stay; a new point gets votes where it is nearer than a neighbour that was known."""
        first = len(self.points)
        self.points = np.concatenate([self.points, np.asarray(points, np.float32)])
        near = self.queries @ self.points[first:].T >= self.least[:, None]  # [queries, new]
        for tree, leaves in zip(self.trees, self.votes, strict=True):
            for i, leaf in enumerate(tree.leaves):
                share = near[leaf].mean(0)
                new = np.flatnonzero(share)
                leaves[i] = np.append(leaves[i][0], first + new), np.append(leaves[i][1], share[new])


class _Tree:
    """A binary tree in arrays: `children[i]` are the nodes below node i, or (−1, leaf)."""

    def __init__(self, oracle: MLANN, queries: np.ndarray, rng: np.random.Generator):
        self.axis: list[int] = []
        self.cut: list[float] = []
        self.children: list[tuple[int, int]] = []
        self.leaves: list[np.ndarray] = []
        self._grow(oracle, queries, rng, np.arange(len(queries)), 0)

    def _grow(
        self, oracle: MLANN, queries: np.ndarray, rng: np.random.Generator, members: np.ndarray, depth: int
    ) -> int:
        node = len(self.children)
        D = queries.shape[1]
        axes = rng.choice(D, max(1, round(D**0.5)), replace=False)
        axis = int(axes[queries[members][:, axes].var(0).argmax()])
        values = queries[members, axis]
        cut = float(np.median(values))
        below = values < cut
        self.axis.append(axis)
        self.cut.append(cut)
        self.children.append((-1, len(self.leaves)))
        if depth == oracle.depth or min(below.sum(), (~below).sum()) < oracle.leaf:
            self.leaves.append(members)
        else:
            left = self._grow(oracle, queries, rng, members[below], depth + 1)
            right = self._grow(oracle, queries, rng, members[~below], depth + 1)
            self.children[node] = (left, right)
        return node

    def leaf_of(self, query: np.ndarray) -> int:
        node = 0
        while self.children[node][0] >= 0:
            node = self.children[node][int(query[self.axis[node]] >= self.cut[node])]
        return self.children[node][1]
