"""Oracles of the FAISS library (extra `oracles`: faiss-cpu), over the exact reduction of xbox.py to L2.

All are approximate but `FaissFlat`, and silent about what they miss. Where a parameter needs more points than there
are, it is cut down; an index too small for its kind is a flat one. FAISS is imported when an index is built.
"""

import dataclasses
import os
from typing import Any

import numpy as np

from certjax.retrieval import oracles, xbox


class _FaissOracle:
    """What the kinds share: `_make(faiss, D, n)` gives an empty index, `_prepare(index, k)` sets up a search."""

    grows = True

    def build(self, points: np.ndarray, queries: np.ndarray | None = None) -> oracles.Searcher:
        """See `Oracle`; the kinds of FAISS are trained on the points.

        Raises:
          ImportError: FAISS is missing.
        """
        del queries
        return xbox.LiftedSearcher(self, points)

    def make(self, points: np.ndarray) -> Any:
        """See `xbox.Library`."""
        index = self._make(import_faiss(), points.shape[1], len(points))
        if not index.is_trained:
            index.train(points)
        index.add(points)
        return index

    def nearest(self, index: Any, queries: np.ndarray, k: int) -> np.ndarray:
        """See `xbox.Library`."""
        self._prepare(index, k)
        return index.search(queries, k)[1]

    def add(self, index: Any, points: np.ndarray) -> bool:
        """See `xbox.Library`."""
        index.add(points)
        return True

    def _make(self, faiss: Any, dimension: int, size: int) -> Any:
        raise NotImplementedError

    def _prepare(self, index: Any, k: int) -> None:
        del index, k


@dataclasses.dataclass(frozen=True)
class FaissFlat(_FaissOracle):
    """Every distance: exact up to float32 rounding."""

    def _make(self, faiss: Any, dimension: int, size: int) -> Any:
        return faiss.IndexFlatL2(dimension)


@dataclasses.dataclass(frozen=True)
class IVF(_FaissOracle):
    """Inverted lists: k-means cells, of which the nearest few are read whole.

    Attributes:
      nlist: cells, at most one for 4 points.
      nprobe: cells read a query.
    """

    nlist: int = 1024
    nprobe: int = 96

    def _make(self, faiss: Any, dimension: int, size: int) -> Any:
        cells = max(1, min(self.nlist, size // 4))
        index = faiss.IndexIVFFlat(faiss.IndexFlatL2(dimension), dimension, cells)
        index.cp.min_points_per_centroid = 1  # fewer than 39 are what a short context has: no reason to warn
        index.nprobe = min(self.nprobe, cells)
        return index


@dataclasses.dataclass(frozen=True)
class HNSW(_FaissOracle):
    """Hierarchical navigable small-world graph.

    Attributes:
      m: links of a node.
      ef_construction: beam of the build.
      ef_search: beam of a query, at least k.
    """

    m: int = 48
    ef_construction: int = 500
    ef_search: int = 176

    def _make(self, faiss: Any, dimension: int, size: int) -> Any:
        index = faiss.IndexHNSWFlat(dimension, self.m)
        index.hnsw.efConstruction = self.ef_construction
        return index

    def _prepare(self, index: Any, k: int) -> None:
        index.hnsw.efSearch = max(self.ef_search, k)


@dataclasses.dataclass(frozen=True)
class NSG(_FaissOracle):
    """Navigating spreading-out graph over the exact neighbour graph, which takes n² distances to build. Cannot grow.

    Attributes:
      degree: links of a node.
      neighbors: GK, links of a node in the neighbour graph.
      search_length: beam of a query, at least k.
    """

    degree: int = 32
    neighbors: int = 128
    search_length: int = 256

    grows = False

    def _make(self, faiss: Any, dimension: int, size: int) -> Any:
        if size <= 4 * self.neighbors:  # FAISS may not return from building over as few points as that
            return faiss.IndexFlatL2(dimension)
        index = faiss.IndexNSGFlat(dimension, self.degree)
        index.GK, index.build_type = self.neighbors, 0  # the other type, NN-descent, ends the process on few points
        return index

    def _prepare(self, index: Any, k: int) -> None:
        if hasattr(index, "nsg"):
            index.nsg.search_L = max(self.search_length, k)


def import_faiss() -> Any:
    """The module `faiss`. Where OMP_WAIT_POLICY is not set it becomes PASSIVE, for FAISS and for what else of OpenMP is
    loaded later; a FAISS that is loaded already does not notice.
    """
    # Threads that spin while they wait take the processors that XLA's threads need. Read once, when FAISS is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        import faiss  # type: ignore[import-not-found]
    except ImportError as e:
        raise ImportError('FAISS is missing: pip install "certjax[oracles]"') from e
    return faiss
