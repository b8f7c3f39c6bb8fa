"""How sure a score, and a difference of two on the same samples, is."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

_Z = 1.959963984540054  # two-sided 95 %
_ERROR = 0.05 / 4  # of each of the four bounds that a difference's interval is made of


@dataclasses.dataclass(frozen=True)
class Paired:
    """Difference of two methods on the same samples, in points.

    Attributes:
      samples: how many.
      difference: mean of other − base.
      low: of an interval that holds the mean difference of independent samples with probability 95 % or more, however
        few they are and whatever their distribution.
      high: its other end.
      p_value: exact, two-sided: how often so many of the samples that differ would be won or lost by fair coins (the
        sign test; for scores of 0 and 1, McNemar's).
    """

    samples: int
    difference: float
    low: float
    high: float
    p_value: float


def interval(scores: Sequence[float]) -> tuple[float, float]:
    """95 % interval (Wilson) of the mean of scores in [0, 1], in points.

    Exact coverage is that of the binomial; scores between 0 and 1 vary less than their mean allows, so that it is too
    wide for them.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    center = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return 100 * max(center - half, 0.0), 100 * min(center + half, 1.0)


def paired(base: Sequence[float], other: Sequence[float]) -> Paired:
    """Compares scores in [0, 1] of the same samples in the same order.

    The difference is gain less loss, both in [0, 1], with Hoeffding's bound (1963, theorem 1) on either side of either:
    P(mean ≥ x) ≤ exp(−n kl(x, μ)) for x ≥ μ, and so below. Four bounds of 1.25 % each hold together with 95 %.

    Args:
      base: scores of one method.
      other: scores of another.

    Raises:
      ValueError: no samples, or numbers of them that differ.
    """
    a, b = np.asarray(base, np.float64), np.asarray(other, np.float64)
    if a.shape != b.shape or not a.size:
        raise ValueError(f"base and other must be scores of the same samples, got {a.size} and {b.size}")
    gain, loss = _bounds(np.maximum(b - a, 0)), _bounds(np.maximum(a - b, 0))
    p_value = mcnemar(int((a > b).sum()), int((b > a).sum()))
    return Paired(a.size, 100 * float((b - a).mean()), 100 * (gain[0] - loss[1]), 100 * (gain[1] - loss[0]), p_value)


def _bounds(x: np.ndarray) -> tuple[float, float]:
    """Lower and upper bound of the mean that numbers in [0, 1] have, each wrong with probability `_ERROR` at most."""
    mean, limit = float(x.mean()), -math.log(_ERROR) / x.size

    def farthest(end: float) -> float:
        near = mean
        for _ in range(60):
            middle = (near + end) / 2
            near, end = (middle, end) if _kl(mean, middle) <= limit else (near, middle)
        return end

    return farthest(0.0), farthest(1.0)


def _kl(x: float, y: float) -> float:
    """Divergence of coins, in nats."""
    part = lambda p, q: 0.0 if p == 0 else math.inf if q == 0 else p * math.log(p / q)
    return part(x, y) + part(1 - x, 1 - y)


def mcnemar(losses: int, wins: int) -> float:
    """Two-sided exact p-value of so uneven a split, or a more uneven one, of discordant pairs by fair coins."""
    n = losses + wins
    tail = sum(math.comb(n, i) for i in range(min(losses, wins) + 1))
    return min(1.0, 2 * tail / 2**n)
