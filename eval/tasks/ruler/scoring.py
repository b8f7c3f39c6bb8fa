"""Official scores: which references an answer contains."""

import math
import re
from collections.abc import Mapping, Sequence

_CONTROL = re.compile(r"[\x00-\x1f]")
EFFECTIVE = 85.6  # score that a length must reach to count as effective: Llama-2-7B's at 4096


def clean(prediction: str) -> str:
    """The answer as it is scored: without white space at its ends, control characters as line ends."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def score(metric: str, prediction: str, references: Sequence[str]) -> float:
    """Score of one answer in [0, 1]; upper and lower case are alike.

    Args:
      metric: "all": share of the references that the answer contains (string_match_all); "part": 1 if it contains any,
        else 0 (string_match_part: the best over the references, not their share).
      prediction: as generated.
      references: right answers.

    Raises:
      ValueError: no reference, or an unknown metric.
    """
    if not references:
        raise ValueError("references is empty: a sample needs at least one right answer")
    text = clean(prediction).lower()
    hits = [reference.lower() in text for reference in references]
    if metric == "all":
        return sum(hits) / len(hits)
    if metric == "part":
        return float(any(hits))
    raise ValueError(f'metric must be "all" or "part", got {metric!r}')


def task_score(scores: Sequence[float]) -> float:
    """100 × mean, rounded to two decimals."""
    return round(100 * sum(scores) / len(scores), 2)


def weighted_averages(by_length: Mapping[int, float]) -> tuple[float, float]:
    """The published averages wAvg (inc) and (dec): means over the lengths with weights 1 … n, and n … 1."""
    scores = [by_length[length] for length in sorted(by_length)]
    total = math.comb(len(scores) + 1, 2)
    weigh = lambda values: sum(i * x for i, x in enumerate(values, 1)) / total
    return weigh(scores), weigh(reversed(scores))


def effective_length(by_length: Mapping[int, float], threshold: float = EFFECTIVE) -> int | None:
    """The largest length whose mean over all tasks reaches the threshold, None if none does."""
    return max((length for length, value in by_length.items() if value >= threshold), default=None)
