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

    grows = True

    def build(self, points: np.ndarray, queries: np.ndarray | None = None) -> oracles.Searcher:
        """See `Oracle`; nothing is trained.

        Raises:
          ImportError: pipnn is missing.
        """
        del queries
        return xbox.LiftedSearcher(self, points)

    def make(self, points: np.ndarray) -> Any:
        """See `xbox.Library`."""
        return import_pipnn().PiPNNIndex(
            points,
            R=self.degree,
            alpha=self.alpha,
            fanout=self.fanout,
            c_min=min(256, self.cluster // 4),
            c_max=self.cluster,
            n_jobs=self.threads,
        )

    def nearest(self, index: Any, queries: np.ndarray, k: int) -> np.ndarray:
        """See `xbox.Library`."""
        return index.query(queries, k, beam_L=max(self.beam, k))[0]

    def add(self, index: Any, points: np.ndarray) -> bool:
        """See `xbox.Library`: the package cannot add."""
        return False


def import_pipnn() -> Any:
    """The module `pipnn`."""
    try:
        import pipnn  # type: ignore[import-not-found]
    except ImportError as e:
        raise ImportError('pipnn is missing: pip install "certjax[oracles]"') from e
    return pipnn
