"""Searches for a size: the answer's property, and how many calls it takes."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from certjax.eval.tasks.ruler.sizing import DoesNotFitError, halved, largest


@given(st.integers(1, 50), st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 10**5), st.integers(0, 6))
def test_largest(rate, fixed, limit, guess, noise):
    calls = []

    def tokens(size):
        calls.append(size)
        return fixed + rate * size + (size * 7919 % 13) * noise  # not monotone

    if tokens(3) > limit:
        with pytest.raises(DoesNotFitError, match=rf"takes {tokens(3)} tokens, more than the {limit}"):
            largest(tokens, limit, floor=3, ceiling=None, guess=guess)
        return
    calls.clear()
    size = largest(tokens, limit, floor=3, ceiling=None, guess=guess)
    assert len(calls) <= 3 * math.log2(abs(size - guess) + 2) + 4
    assert {size, size + 1} <= {*calls}
    assert tokens(size) <= limit < tokens(size + 1)


def test_ceiling_and_floor():
    assert largest(lambda size: size, 100, floor=1, ceiling=40, guess=1) == 40
    assert largest(lambda size: size, 100, floor=1, ceiling=100, guess=500) == 100
    assert largest(lambda size: size, 100, floor=100, ceiling=None, guess=1) == 100
    assert largest(lambda size: size, 39, floor=1, ceiling=40, guess=40) == 39


def test_halved():
    assert halved(lambda size: 3 * size, 100, low=5, high=90) == 33
    assert halved(lambda size: 3 * size, 10, low=5, high=90) is None
    assert halved(lambda size: 3 * size, 1000, low=5, high=90) == 90
