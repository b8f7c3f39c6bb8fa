"""Intervals and tests against values worked out otherwise."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from certjax.eval.tasks import ruler


def test_mcnemar_by_hand():
    assert ruler.mcnemar(0, 0) == 1
    assert ruler.mcnemar(0, 5) == ruler.mcnemar(5, 0) == 2 / 2**5
    assert ruler.mcnemar(1, 3) == 2 * (1 + 4) / 16
    assert ruler.mcnemar(4, 4) == 1


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_binomial_test(losses, wins):
    if losses + wins:
        expected = stats.binomtest(losses, losses + wins, 0.5).pvalue
        assert ruler.mcnemar(losses, wins) == pytest.approx(expected, rel=1e-9)


@given(st.integers(0, 30), st.integers(1, 30))
def test_interval_is_wilsons(hits, n):
    hits = min(hits, n)
    expected = stats.binomtest(hits, n).proportion_ci(0.95, "wilson")
    assert ruler.interval([1.0] * hits + [0.0] * (n - hits)) == pytest.approx(
        (100 * expected.low, 100 * expected.high), abs=1e-9
    )


def test_paired_uses_the_pairs():
    rng = np.random.default_rng(0)
    base = (rng.random(60) < 0.5).astype(float)
    other = base.copy()
    lost = np.flatnonzero(base)[:8]
    other[lost] = 0
    result = ruler.paired(base, other)
    assert result.samples == 60
    assert result.difference == pytest.approx(-100 * 8 / 60)
    assert -100 * 15 / 60 < result.low < result.difference < result.high < 0
    assert result.p_value == pytest.approx(2 / 2**8)
    # The same scores without their pairing differ as much, but much less surely.
    loose = ruler.paired(base, rng.permutation(other))
    assert loose.difference == pytest.approx(result.difference)
    assert loose.high - loose.low > 1.5 * (result.high - result.low)
    assert ruler.paired(base, other) == result


def test_shares_have_no_mcnemar_test():
    assert ruler.paired([0.5, 1.0, 0.25], [0.5, 0.75, 0.25]).p_value is None


def test_mistakes():
    for base, other in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ValueError, match="scores of the same samples"):
            ruler.paired(base, other)
