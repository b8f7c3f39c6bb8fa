"""How much text fits: searches that cannot go on for ever."""

from collections.abc import Callable


class DoesNotFitError(ValueError):
    """A prompt that cannot be made: too little room, or nothing left to fill it with."""


def largest(tokens: Callable[[int], int], limit: int, *, floor: int, ceiling: int | None, guess: int) -> int:
    """A size s with tokens(s) ≤ limit and tokens(s + 1) > limit, both looked at.

    Doubles its step from a guess until it has sizes that fit and that do not, then alternates between interpolation and
    halving: O(log |s − guess|) calls. `tokens` need not be monotone.

    Args:
      tokens: of a size.
      limit: largest count that fits.
      floor: smallest size.
      ceiling: largest size, or None. If that fits, it is the answer, and no larger one was looked at.
      guess: where to begin.

    Raises:
      DoesNotFitError: the floor does not fit, or sizes far above the limit do.
    """
    counts: dict[int, int] = {}
    top = float("inf") if ceiling is None else ceiling

    def fits(size: int) -> bool:
        counts[size] = tokens(size)
        check_growth(size, counts[size], limit)
        return counts[size] <= limit

    low = high = int(min(max(guess, floor), top))
    step = 1
    if fits(low):
        while low == high:
            if low == top:
                return low
            high = int(min(low + step, top))
            if fits(high):
                low = high
            step *= 2
    else:
        while low == high:
            if low == floor:
                raise DoesNotFitError(
                    f"the smallest prompt takes {counts[floor]} tokens, more than the {limit} that the answer leaves; "
                    "ask for a greater length"
                )
            low = max(high - step, floor)
            if not fits(low):
                high = low
            step *= 2
    interpolate = True
    while high - low > 1:
        middle = (low + high) // 2
        if interpolate and counts[high] > counts[low]:
            middle = low + (limit - counts[low]) * (high - low) // (counts[high] - counts[low])
            middle = min(max(middle, low + 1), high - 1)
        interpolate = not interpolate
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def check_growth(size: int, count: int, limit: int) -> None:
    """Raises DoesNotFitError where a size can be only so large because tokens are not counted: each unit has some."""
    if count <= limit < size / 4 - 25:
        raise DoesNotFitError(f"{size} units are counted as {count} tokens: does the tokenizer cut off what is long?")


def halved(tokens: Callable[[int], int], limit: int, *, low: int, high: int) -> int | None:
    """The published search: halves low … high to the largest size that fits, None if none that it meets does."""
    best = None
    while low <= high:
        middle = (low + high) // 2
        if tokens(middle) <= limit:
            best, low = middle, middle + 1
        else:
            high = middle - 1
    return best
