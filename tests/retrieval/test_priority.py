"""Priority sampling: unbiased, of the stated variance, in logarithms."""

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax.retrieval import priority

DRAWS = 8000
weigh = jax.jit(priority.weigh, static_argnums=3)
FAMILIES = {
    "flat": np.zeros(60),
    "peaked": -np.arange(60) / 3.0,
    "normal": np.random.default_rng(0).normal(size=60) * 2,
    "one_has_all": np.r_[30.0, np.zeros(59)],
    "mostly_zero": np.where(np.arange(60) % 4, -np.inf, np.arange(60) / 20),
    "huge_scores": 3e4 + np.random.default_rng(1).normal(size=60),
}


def draws(log_weight, K, count=DRAWS, seed=0):
    """ln ŵ [count, n] of many independent samples, dense."""
    n = len(log_weight)
    log_weight = jnp.asarray(log_weight, jnp.float32)
    exponential = jnp.asarray(np.random.default_rng(seed).exponential(size=(count, n)), jnp.float32)
    taken = jax.lax.top_k(log_weight[None] + exponential, K + 1)[1]
    rows = jnp.arange(count)[:, None]
    weights, _ = weigh(log_weight[taken], exponential[rows, taken], taken >= 0, n)
    return np.asarray(jnp.full((count, n), -jnp.inf).at[rows, taken].set(weights), np.float64)


def mean_interval(x, z=4.5):
    """Normal interval of the mean over the first axis: left with probability 7e-6."""
    return x.mean(0) - z * x.std(0) / np.sqrt(len(x)), x.mean(0) + z * x.std(0) / np.sqrt(len(x))


class ExponentialsTest(chex.TestCase):
    def test_longer_calls_continue_shorter_ones(self):
        key = jax.random.key(3)
        short, long = priority.exponentials(key, 10), priority.exponentials(key, 300)
        np.testing.assert_array_equal(short, long[:10])
        self.assertGreaterEqual(float(long.min()), 0)
        self.assertEqual(priority.exponentials(key, 0).shape, (0,))


class WeighTest(chex.TestCase):
    @parameterized.product(family=list(FAMILIES), K=(5, 20))
    def test_unbiased_for_every_subset_and_within_the_variance_bound(self, family, K):
        log_weight = FAMILIES[family]
        top = log_weight.max()
        w = np.exp(log_weight - top)
        sampled = np.exp(draws(log_weight, K) - top)
        subset = (np.arange(60) % 3 == 0).astype(float)
        for part in (np.ones(60), subset, 1 - subset):
            low, high = mean_interval(sampled @ part)
            slack = 1e-3 * w.sum() if family == "huge_scores" else 1e-5 * w.sum()  # float32 scores of 3e4
            assert low - slack <= w @ part <= high + slack
        square = (sampled.sum(1) - w.sum()) ** 2
        low, _ = mean_interval(square)
        bound = w.sum() ** 2 / (K - 1)
        assert low <= bound
        if family == "flat":  # where the bound is tight, up to the share that is read
            assert square.mean() > 0.85 * bound * (1 - K / 60)

    def test_estimates_are_uncorrelated(self):
        w = np.exp(FAMILIES["normal"])
        sampled = np.exp(draws(FAMILIES["normal"], 8))
        for i, j in ((0, 1), (3, 40), (17, 59)):
            low, high = mean_interval(sampled[:, i] * sampled[:, j])
            assert low <= w[i] * w[j] <= high

    @parameterized.parameters("flat", "normal", "one_has_all")
    def test_output_error(self, family):
        # Worst values for the bound: all at nearly the same distance from the output, heavy keys on one side of it.
        K, n = 100, 400
        log_weight = {
            "flat": np.zeros(n),
            "normal": np.sort(np.random.default_rng(0).normal(size=n) * 2),
            "one_has_all": np.r_[np.zeros(n - 1), 30.0],
        }[family]
        w = np.exp(log_weight - log_weight.max())
        side = np.where(w.cumsum() <= w.sum() / 2, -1.0, 1.0)[:, None]
        o = w @ side / w.sum()
        R = np.linalg.norm(side - o, axis=1).max()
        sampled = np.exp(draws(log_weight, K) - log_weight.max())
        numerator = sampled @ (side - o)
        low, _ = mean_interval((numerator**2).sum(1))
        assert low <= R**2 * w.sum() ** 2 / (K - 1)
        error = np.linalg.norm(numerator, axis=1) / sampled.sum(1)
        bound = R * 6**0.5 / ((K - 1) ** 0.5 - 6**0.5)
        assert bound < R  # any convex combination of the values is within R
        assert mean_interval((error > bound).astype(float))[1] <= 1 / 3

    def test_all_present_is_exact(self):
        log_weight, exponential = jnp.arange(4.0)[None], jnp.ones((1, 4))
        present = jnp.ones((1, 4), bool)
        weights, log_tau = weigh(log_weight, exponential, present, 4)
        np.testing.assert_array_equal(weights, log_weight)
        assert log_tau == -np.inf
        # A larger request than there are keys leaves gaps, and is exact too.
        gaps = present.at[0, 2].set(False)
        weights, log_tau = weigh(log_weight, exponential, gaps, 3)
        np.testing.assert_array_equal(weights, [[0, 1, -np.inf, 3]])
        assert log_tau == -np.inf

    def test_missing_keys_make_a_smaller_sample(self):
        log_weight = jnp.array([[0.0, 2.0, 1.0, 5.0]])
        present = jnp.array([[True, False, True, True]])
        weights, log_tau = weigh(log_weight, jnp.array([[3.0, 9.0, 1.0, 0.0]]), present, 100)
        assert float(log_tau[0]) == 2  # the smallest priority of those present: 1 + 1
        np.testing.assert_array_equal(weights, [[2, -np.inf, -np.inf, 5]])

    def test_nothing_present(self):
        weights, log_tau = weigh(jnp.zeros((2, 3)), jnp.ones((2, 3)), jnp.zeros((2, 3), bool), 10)
        assert np.all(np.isneginf(weights))
        assert np.all(np.isneginf(log_tau))

    def test_zero_weights_stay_zero_and_the_rest_is_exact(self):
        log_weight = jnp.array([[1.0, -jnp.inf, -jnp.inf]])
        weights, log_tau = weigh(log_weight, jnp.ones((1, 3)), jnp.ones((1, 3), bool), 10)
        assert float(weights[0, 0]) == 1
        assert np.isneginf(log_tau[0])
        assert np.isneginf(weights[0, 1:]).all()


@hypothesis.given(
    st.lists(st.floats(-50, 50, width=32), min_size=6, max_size=6), st.integers(0, 2**31), st.floats(-1e4, 1e4)
)
def test_weights_follow_a_shift_of_the_scores(scores, seed, shift):
    scores = np.array(scores, np.float32)[None]
    exponential = np.random.default_rng(seed).exponential(size=scores.shape).astype(np.float32)
    present = np.ones(scores.shape, bool)
    weights, log_tau = (np.asarray(x) for x in weigh(scores, exponential, present, 1000))
    assert np.isneginf(weights).sum() == 1  # one key is the threshold
    assert (weights[~np.isneginf(weights)] >= log_tau).all()
    moved, _ = weigh(scores + np.float32(shift), exponential, present, 1000)
    np.testing.assert_allclose(np.max(moved), np.max(weights) + np.float32(shift), atol=1e-2)


@pytest.mark.slow
def test_unbiased_at_many_sizes():
    rng = np.random.default_rng(5)
    for n, K in ((10, 2), (200, 3), (2000, 50)):
        log_weight = rng.normal(size=n) * 3
        w = np.exp(log_weight)
        low, high = mean_interval(np.exp(draws(log_weight, K, 50_000 if n < 2000 else 5000)).sum(1))
        assert low <= w.sum() <= high
