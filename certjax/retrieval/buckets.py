"""The strategies that find the largest priorities with oracles over the keys themselves, not lifted ones: keys are put
into buckets by u, and within a bucket the order of scores is nearly that of priorities.

Source: "Attention via Black-Box Vector Search" (arXiv 2610.10135). The loops depend on the answers, so they run
outside JAX (host.py).
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from certjax.retrieval import host, oracles
from certjax.retrieval.strategies import PriorityStrategy


@dataclasses.dataclass(frozen=True)
class _Buckets(PriorityStrategy):
    """β = (n / (K + 1))^(1 / (T + 1)); bucket j < T holds the keys with β^−(j + 1) < u ≤ β^−j and has an oracle, the
    rest is read directly. When n has grown four times by appending, β is chosen anew, for the same u.

    Attributes:
      samples: K.
      buckets: T.
    """

    samples: int = 127
    buckets: int = 2

    def _count(self) -> int:
        return self.samples + 1

    def _retriever(
        self,
        points: np.ndarray,
        exponentials: np.ndarray,
        oracle: oracles.Oracle,
        queries: np.ndarray | None,
        scale: float,
    ) -> host.Retriever:
        retriever = _Retriever(self, oracle, queries, scale)
        retriever.append(points, exponentials)
        return retriever

    def _search(self, pool: "_Pool", count: int) -> tuple[np.ndarray, bool]:
        """Asks until it is done: ids of the largest priorities, and whether that failed."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AdaptiveBuckets(_Buckets):
    """Asks every bucket for one key, then always the bucket whose unseen keys could have the largest priority for
    twice as many, until no unseen key can be among the K + 1 largest.

    With exact oracles it returns what `SoftmaxLift(budget=K + 1)` does for the same rng, and promises the same: see
    there for what that is not. It needs an expected O(n^(1 / (T + 1)) K^(T / (T + 1))) keys, or O(K + ln n) with
    T = ⌈log2 n⌉.

    Attributes:
      samples: K.
      buckets: T.
      budget: keys requested of all oracles, at most; the direct bucket is read in any case. Where it is spent before
        all K + 1 are known, those that are known to be the largest make a smaller sample and `failed` is True; as its
        size depends on the priorities it is no longer exactly unbiased. None for no limit.
    """

    budget: int | None = None

    def _search(self, pool: "_Pool", count: int) -> tuple[np.ndarray, bool]:
        asked = [0] * len(pool.parts)
        while True:
            best, threshold = pool.best(count)
            frontier = [pool.frontier(j) for j in range(len(asked))]
            j = int(np.argmax(frontier)) if frontier else 0
            if not (frontier and frontier[j] > threshold):  # so written that NaN ends it
                return best, False
            more = min(max(1, 2 * asked[j]), pool.size(j))
            if self.budget is not None and pool.requested + more > self.budget:
                return pool.above(best, frontier[j]), True
            asked[j] = more
            pool.ask(j, more)


@dataclasses.dataclass(frozen=True)
class NonAdaptiveBuckets(_Buckets):
    """Asks every bucket once, for r = ⌈20 β (K + 1)⌉ keys.

    Where no unseen key can be among the K + 1 largest priorities, the answer is that of `SoftmaxLift(budget=K + 1)`,
    with the promise that is made there. Where one can, a bucket has overflowed: `failed` is True, the answer is the
    best that was seen, and nothing is promised. Overflow is checked for each query, not only improbable; still no
    bound on the output's error comes with a call, unlike with `certjax.decode_attention`.

    Attributes:
      samples: K.
      buckets: T.
    """

    def _search(self, pool: "_Pool", count: int) -> tuple[np.ndarray, bool]:
        r = int(np.ceil(20 * pool.beta * count))
        for j in range(len(pool.parts)):
            pool.ask(j, min(r, pool.size(j)))
        best, threshold = pool.best(count)
        return best, any(pool.frontier(j) > threshold for j in range(len(pool.parts)))


class _Part(NamedTuple):
    """A bucket: the keys' numbers, and an index over them, if it holds any."""

    ids: np.ndarray = np.empty(0, np.int64)
    searcher: oracles.Searcher | None = None


GROWTH = 4  # of n since β was chosen, from where the buckets are built anew with another


class _Retriever:
    def __init__(self, strategy: _Buckets, oracle: oracles.Oracle, queries: np.ndarray | None, scale: float):
        self.strategy, self.oracle, self.queries, self.scale = strategy, oracle, queries, scale
        self.log_beta = 0.0
        self.size = 0  # n that β was chosen for
        self.parts: list[_Part] = []
        self.direct = np.empty(0, np.int64)
        self.points = np.empty((0, 0), np.float32)
        self.exponentials = np.empty(0)

    def append(self, points: np.ndarray, exponentials: np.ndarray) -> None:
        first = len(self.exponentials)
        points = np.concatenate([self.points, points]) if first else points
        exponentials = np.concatenate([self.exponentials, exponentials.astype(np.float64)])
        n, T = len(points), self.strategy.buckets
        if n >= GROWTH * self.size:
            # β = 1 puts every key into the direct bucket.
            log_beta = max(np.log(max(n, 1) / (self.strategy.samples + 1)), 0.0) / (T + 1)
            first, size, parts, direct = 0, n, [_Part()] * T, np.empty(0, np.int64)
        else:
            log_beta, size, parts, direct = self.log_beta, self.size, self.parts, self.direct
        # E = −ln u in [j ln β, (j + 1) ln β)
        part = np.searchsorted(log_beta * np.arange(1, T + 1), exponentials[first:], side="right")
        grown = []
        for j, (ids, searcher) in enumerate(parts):
            new = first + np.flatnonzero(part == j)
            if searcher is not None and len(new):
                searcher.append(points[new])
            elif len(new):
                searcher = self.oracle.build(points[new], self.queries)
            grown.append(_Part(np.concatenate([ids, new]), searcher))
        # Only now: an index that cannot grow leaves everything as it was.
        self.log_beta, self.size, self.parts = log_beta, size, grown
        self.direct = np.concatenate([direct, first + np.flatnonzero(part == T)])
        self.points, self.exponentials = points, exponentials

    def retrieve(self, queries: np.ndarray, count: int) -> host.Found:
        G = len(queries)
        ids = np.full((G, count), -1, np.int32)
        requested, direct, failed = np.zeros(G, np.int32), np.zeros(G, np.int32), np.zeros(G, bool)
        for g, query in enumerate(queries):
            with np.errstate(over="ignore"):  # a score of −∞ is a weight of zero
                pool = _Pool(self, query)
                found, missed = self.strategy._search(pool, count)
            failed[g] = missed or pool.short
            ids[g, : len(found)] = found
            requested[g], direct[g] = pool.requested, pool.direct
        return ids, requested, direct, failed


class _Pool:
    """What is known of one query: the keys seen, and how large the priority of an unseen key can be."""

    def __init__(self, retriever: _Retriever, query: np.ndarray):
        self.retriever, self.query = retriever, query
        self.parts = [part for part in retriever.parts if part.searcher is not None]
        self.edges = [
            (j + 1) * retriever.log_beta for j, part in enumerate(retriever.parts) if part.searcher is not None
        ]
        self.beta = float(np.exp(retriever.log_beta))
        self.requested, self.direct = 0, len(retriever.direct)
        self.ids = [retriever.direct] + [np.empty(0, np.int64) for _ in self.parts]
        self.priorities = [self._priorities(retriever.direct)] + [np.empty(0) for _ in self.parts]
        self.unseen = [np.inf for _ in self.parts]  # upper bound of the scores of unseen keys
        self.short = False  # an oracle returned fewer keys than it was asked for and holds

    def _scores(self, ids: np.ndarray) -> np.ndarray:
        return self.retriever.points[ids] @ self.query * np.float32(self.retriever.scale)

    def _priorities(self, ids: np.ndarray) -> np.ndarray:
        return self._scores(ids) + self.retriever.exponentials[ids]

    def size(self, j: int) -> int:
        return len(self.parts[j].ids)

    def ask(self, j: int, m: int) -> None:
        """Asks bucket j for its best m, at most its size."""
        part = self.parts[j]
        assert part.searcher is not None
        found = part.searcher.search(self.query[None], m)[0]
        found = part.ids[found[found >= 0]]
        self.requested += m
        self.short |= len(found) < m
        scores = self._scores(found)
        # An oracle that returns fewer than it could has no more to give.
        self.unseen[j] = scores.min() if len(found) == m < len(part.ids) else -np.inf
        self.ids[j + 1] = found
        self.priorities[j + 1] = scores + self.retriever.exponentials[found]

    def frontier(self, j: int) -> float:
        """No unseen key of bucket j has a larger priority."""
        return self.unseen[j] + self.edges[j]

    def best(self, count: int) -> tuple[np.ndarray, float]:
        """The `count` seen keys of largest priority, in that order, and the last priority; −inf if there are fewer."""
        ids, priorities = np.concatenate(self.ids), np.concatenate(self.priorities)
        order = np.argsort(-priorities, kind="stable")[:count]
        return ids[order], priorities[order[-1]] if len(order) == count else -np.inf

    def above(self, ids: np.ndarray, least: float) -> np.ndarray:
        """Those of `ids` whose priority is at least `least`."""
        return ids[self._priorities(ids) >= least]
