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


def test_paired_by_hand():
    base, other = [1.0] * 8 + [0.0] * 52, [0.0] * 8 + [0.0] * 52
    result = ruler.paired(base, other)
    assert (result.samples, result.difference) == (60, pytest.approx(-100 * 8 / 60))
    assert result.p_value == pytest.approx(2 / 2**8)
    # No gain in 60: its bound is 1 − 0.0125^(1/60). The loss lies where n kl(8/60, μ) = ln 80.
    none = 1 - 0.0125 ** (1 / 60)
    for end, rest in ((result.low, 0.0), (result.high, none)):
        loss = rest - end / 100
        mean = 8 / 60
        kl = mean * np.log(mean / loss) + (1 - mean) * np.log((1 - mean) / (1 - loss))
        assert 60 * kl == pytest.approx(np.log(80), rel=1e-6)
    assert result.low < result.difference < result.high


def test_paired_uses_the_pairs():
    rng = np.random.default_rng(0)
    base = (rng.random(60) < 0.5).astype(float)
    other = base.copy()
    other[np.flatnonzero(base)[:8]] = 0
    result = ruler.paired(base, other)
    # The same scores without their pairing differ as much, but much less surely.
    loose = ruler.paired(base, rng.permutation(other))
    assert loose.difference == pytest.approx(result.difference)
    assert loose.high - loose.low > 1.5 * (result.high - result.low)
    assert loose.p_value > 10 * result.p_value


def test_few_equal_samples_prove_little():
    for n in (1, 3, 10):
        result = ruler.paired([0.5] * n, [0.5] * n)
        assert (result.difference, result.p_value) == (0, 1)
        assert result.high == -result.low == pytest.approx(100 * (1 - 0.0125 ** (1 / n)))


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20))
def test_intervals_hold_the_difference_and_turn_round(pairs):
    base, other = zip(*pairs, strict=True)
    result, back = ruler.paired(base, other), ruler.paired(other, base)
    assert -100 <= result.low <= result.difference + 1e-9
    assert result.difference - 1e-9 <= result.high <= 100
    assert (back.low, back.high) == pytest.approx((-result.high, -result.low))


@pytest.mark.parametrize("n", [5, 20, 60])
@pytest.mark.parametrize("shares", [False, True])
def test_the_interval_covers(n, shares):
    rng, missed, rounds = np.random.default_rng(n), 0, 1500
    for _ in range(rounds):
        base = (rng.random(n) < 0.7) * (rng.integers(1, 5, n) / 4 if shares else 1.0)
        lost = rng.random(n) < 0.15
        result = ruler.paired(base, np.where(lost, 0, base))
        true = -100 * 0.15 * 0.7 * (0.625 if shares else 1)
        missed += not result.low <= true <= result.high
    # Percentile bootstrap misses a fifth to a half of the time here.
    assert missed / rounds < 0.05


def test_mistakes():
    for base, other in (([], []), ([1.0], [1.0, 0.0])):
        with pytest.raises(ValueError, match="scores of the same samples"):
            ruler.paired(base, other)
