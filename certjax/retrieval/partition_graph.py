"""The partition-based graph index PiPNN, of the package pipnn (extra `oracles`), over the reduction of xbox.py to L2.

Approximate, and silent about what it misses.
"""

import dataclasses
from typing import Any

import numpy as np

from certjax.retrieval import oracles, xbox


@dataclasses.dataclass(frozen=True)
class PiPNN:
    """Overlapping random partitions, each searched exhaustively for links, pruned to one graph (Rubel et al.,
    arXiv 2602.21247), as implemented by pipnn, which is not the authors' own code. Appending builds it anew.

    Attributes:
      degree: links of a node.
      alpha: slack of the pruning rule, at least 1.
      fanout: parts that a point belongs to. The build takes time in proportion.
      cluster: largest part, points.
      beam: of a query, at least k.
      threads: of the build; 0 for all.
    """

    degree: int = 48
    alpha: float = 1.13
    fanout: int = 30
    cluster: int = 1024
    beam: int = 256
    threads: int = 0

    def build(self, points: np.ndarray, queries: np.ndarray | None = None) -> oracles.Searcher:
        """See `Oracle`; nothing is trained.

        Raises:
          ImportError: pipnn is missing.
        """
        del queries
        return _GraphSearcher(self, np.array(points, np.float32))


class _GraphSearcher:
    def __init__(self, oracle: PiPNN, points: np.ndarray):
        self.oracle, self.points = oracle, points
        self._rebuild()

    def _rebuild(self) -> None:
        self.bound = xbox.largest_norm(self.points)
        self.index = import_pipnn().PiPNNIndex(
            xbox.lift(self.points, self.bound),
            R=self.oracle.degree,
            alpha=self.oracle.alpha,
            fanout=self.oracle.fanout,
            c_min=min(256, self.oracle.cluster // 4),
            c_max=self.oracle.cluster,
            n_jobs=self.oracle.threads,
        )

    def search(self, queries: np.ndarray, k: int) -> np.ndarray:
        lifted = xbox.lift_queries(queries, self.bound)
        ids, _ = self.index.query(lifted, min(k, len(self.points)), beam_L=max(self.oracle.beam, k))
        return oracles.clean(ids, len(self.points), k)

    def append(self, points: np.ndarray) -> None:
        self.points = np.concatenate([self.points, np.asarray(points, np.float32)])
        self._rebuild()


def import_pipnn() -> Any:
    """The module `pipnn`."""
    try:
        import pipnn  # type: ignore[import-not-found]
    except ImportError as e:
        raise ImportError('pipnn is missing: pip install "certjax[oracles]"') from e
    return pipnn
