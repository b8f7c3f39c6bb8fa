"""How sure a score, and a difference of two on the same samples, is."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_Z = 1.959963984540054  # two-sided 95 %


@dataclasses.dataclass(frozen=True)
class Paired:
    """Difference of two methods on the same samples, in points.

    Attributes:
      samples: how many.
      difference: mean of other − base.
      low: of the 95 % interval over resampled samples; no width where all differences are equal, however few they are.
      high: its other end.
      p_value: McNemar's exact test, two-sided; None unless all scores are 0 or 1.
    """

    samples: int
    difference: float
    low: float
    high: float
    p_value: float | None


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval (Wilson) of the mean of scores in [0, 1], in points.

    Exact coverage is that of the binomial; scores between 0 and 1 vary less than their mean allows, so that it is too
    wide for them.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return 100 * max(center - half, 0.0), 100 * min(center + half, 1.0)


def paired(base: Sequence[float], other: Sequence[float], *, draws: int = 10_000, seed: int = 0) -> Paired:
    """Compares scores in [0, 1] of the same samples in the same order.

    Args:
      base: scores of one method.
      other: scores of another.
      draws: resampled sets (percentile bootstrap).
      seed: of the resampling.

    Raises:
      ValueError: no samples, or numbers of them that differ.
    """
    a, b = np.asarray(base, np.float64), np.asarray(other, np.float64)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"base and other must be scores of the same samples, got {a.size} and {b.size}")
    differences = 100 * (b - a)
    rng = np.random.default_rng(seed)
    means = [differences[rng.integers(0, a.size, a.size)].mean() for _ in range(draws)]
    low, high = np.percentile(means, (2.5, 97.5))
    binary = np.isin(np.concatenate([a, b]), (0, 1)).all()
    p_value = mcnemar(int((a > b).sum()), int((b > a).sum())) if binary else None
    return Paired(a.size, float(differences.mean()), float(low), float(high), p_value)


def mcnemar(losses: int, wins: int) -> float:
    """Two-sided exact p-value of so uneven a split, or a more uneven one, of discordant pairs by fair coins."""
    n = losses + wins
    tail = sum(math.comb(n, i) for i in range(min(losses, wins) + 1))
    return min(1.0, 2 * tail / 2**n)
