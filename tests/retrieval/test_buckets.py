"""Buckets find what the lifted search finds, or say that they did not, at the cost the theory states."""

import math

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax import retrieval
from tests.retrieval.test_strategies import LENGTH, head, query

PLAIN = {"window": 0, "sinks": 0, "scale": 1.0}


def run(strategy, scores, exponential):
    """One query over keys with the given scores, outside JAX: ids, requested, direct, failed."""
    points = np.asarray(scores, np.float32)[:, None]
    retriever = strategy._retriever(points, np.asarray(exponential), retrieval.Flat(), None, 1.0)
    ids, *rest = retriever.retrieve(np.ones((1, 1), np.float32), strategy.samples + 1)
    return ids[0], *(x[0] for x in rest)


class BucketsTest(chex.TestCase):
    @parameterized.parameters((1, True), (2, True), (12, True), (2, False))
    def test_the_same_as_softmax_lift(self, buckets, adaptive):
        keys, values = head()
        lift = retrieval.SoftmaxLift(33, window=64)
        kind = retrieval.AdaptiveBuckets if adaptive else retrieval.NonAdaptiveBuckets
        strategy = kind(32, buckets, window=64)
        rng = jax.random.key(7)
        index = strategy.build(keys, rng)
        got = strategy.attend(query(), keys, values, index)
        want = lift.attend(query(), keys, values, lift.build(keys, rng))
        np.testing.assert_array_equal(np.sort(got.ids, 1), np.sort(want.ids, 1))
        np.testing.assert_allclose(got.output, want.output, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(got.log_threshold, want.log_threshold, rtol=1e-6)
        assert not got.failed.any()
        assert (got.keys_direct > 0).all()
        assert (got.keys_requested < LENGTH * 2).all()
        retrieval.release(index)

    def test_appended_keys_are_found(self):
        keys, values = head()
        strategy, rng = retrieval.AdaptiveBuckets(32, 2, window=64), jax.random.key(7)
        index = strategy.build(keys, rng, length=300)
        index = strategy.append(index, keys)
        got = strategy.attend(query(), keys, values, index)
        lift = retrieval.SoftmaxLift(33, window=64)
        want = lift.attend(query(), keys, values, lift.build(keys, rng))
        np.testing.assert_array_equal(np.sort(got.ids, 1), np.sort(want.ids, 1))
        retrieval.release(index)

    @parameterized.parameters(retrieval.AdaptiveBuckets, retrieval.NonAdaptiveBuckets)
    def test_a_short_beginning_does_not_make_later_answers_dear(self, kind):
        rng, n = np.random.default_rng(2), 20_000
        points, exponential = rng.normal(size=(n, 1)).astype(np.float32) * 2, rng.exponential(size=n)
        strategy, one = kind(15, 1, **PLAIN), np.ones((1, 1), np.float32)
        cost = []
        for first in (60, n):
            retriever = strategy._retriever(points[:first], exponential[:first], retrieval.Flat(), None, 1.0)
            for start in range(first, n, 997):
                retriever.append(points[start : start + 997], exponential[start : start + 997])
            ids, requested, direct, failed = retriever.retrieve(one, 16)
            want = np.argsort(-points[:, 0] - exponential)[:16]
            np.testing.assert_array_equal(np.sort(ids[0]), np.sort(want))
            assert not failed[0]
            cost.append(requested[0] + direct[0])
        assert cost[0] < 4 * cost[1]

    def test_an_index_that_cannot_grow_stays_as_it_was(self):
        pytest.importorskip("faiss", reason="faiss is missing: pip install 'certjax[oracles]'")
        keys, values = head()
        strategy = retrieval.AdaptiveBuckets(32, 2, window=64)
        index = strategy.build(keys, jax.random.key(7), retrieval.NSG(), length=300)
        before = strategy.attend(query(), keys, values, index)
        with pytest.raises(NotImplementedError, match="NSG cannot grow"):
            strategy.append(index, keys)
        chex.assert_trees_all_equal(strategy.attend(query(), keys, values, index), before)
        retrieval.release(index)

    def test_overflow_is_reported(self):
        # All weights are equal and the draw is not: with one key a bucket the answer is wrong, and says so.
        rng = np.random.default_rng(0)
        strategy = retrieval.NonAdaptiveBuckets(4, 1, **PLAIN)
        ids, requested, _, failed = run(strategy, np.zeros(4000), rng.exponential(size=4000))
        assert requested == math.ceil(20 * (4000 / 5) ** 0.5 * 5)
        assert not failed
        hard = np.zeros(200_000)
        ids, requested, direct, failed = run(strategy, hard, np.full(200_000, 0.1))
        assert failed
        assert direct == 0
        assert (ids >= 0).all()

    def test_budget(self):
        rng = np.random.default_rng(1)
        scores, exponential = rng.normal(size=20_000) * 2, rng.exponential(size=20_000)
        whole = run(retrieval.AdaptiveBuckets(63, 2, **PLAIN), scores, exponential)
        cut = run(retrieval.AdaptiveBuckets(63, 2, int(whole[1]) // 2, **PLAIN), scores, exponential)
        enough = run(retrieval.AdaptiveBuckets(63, 2, int(whole[1]), **PLAIN), scores, exponential)
        np.testing.assert_array_equal(whole[0], enough[0])
        assert not enough[3]
        assert cut[3]
        assert cut[1] <= whole[1] // 2
        known = cut[0][cut[0] >= 0]
        assert 0 < len(known) < 64
        np.testing.assert_array_equal(known, whole[0][: len(known)])  # a prefix: the largest priorities, all certain


@hypothesis.given(
    st.integers(1, 60), st.integers(1, 12), st.integers(1, 5), st.integers(0, 2**31), st.sampled_from((0.0, 1.0, 30.0))
)
def test_adaptive_is_exact(n, samples, buckets, seed, spread):
    rng = np.random.default_rng(seed)
    scores = np.round(rng.normal(size=n) * spread, 1).astype(np.float32)  # with ties
    exponential = rng.exponential(size=n)
    strategy = retrieval.AdaptiveBuckets(samples, buckets, **PLAIN)
    ids, requested, direct, failed = run(strategy, scores, exponential)
    want = np.sort(scores + exponential)[::-1][: samples + 1]
    found = ids[ids >= 0]
    assert not failed
    assert len(set(found)) == len(want)
    np.testing.assert_allclose((scores + exponential)[found], want, rtol=1e-6)
    assert direct <= n
    assert requested <= 4 * n


def count(buckets, n, samples, seeds=6):
    """Mean keys needed over synthetic scores of standard deviation 2."""
    total = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        strategy = retrieval.AdaptiveBuckets(samples, buckets, **PLAIN)
        _, requested, direct, _ = run(strategy, rng.normal(size=n) * 2, rng.exponential(size=n))
        total.append(requested + direct)
    return np.mean(total)


def exponent(x, y):
    return np.polyfit(np.log(x), np.log(y), 1)[0]


SIZES = [1 << e for e in range(10, 18)]
SAMPLES = [15, 31, 63, 127, 255]  # K = ε⁻²


class GrowthTest(chex.TestCase):
    """Retrieval counts against n and K = ε⁻², within 0.1 of the exponents; doubling makes the counts coarse."""

    @parameterized.parameters(1, 2)
    def test_few_buckets(self, T):
        # n^(1 / (T + 1)) ε^(−2 + 2 / (T + 1)): √n / ε for T = 1.
        assert abs(exponent(SIZES, [count(T, n, 31) for n in SIZES]) - 1 / (T + 1)) < 0.1
        by_samples = [count(T, 1 << 16, K) for K in SAMPLES]
        assert abs(exponent(SAMPLES, by_samples) - T / (T + 1)) < 0.1

    def test_many_buckets(self):
        # log n + ε⁻² for T = ⌈log2 n⌉: a doubling of n adds a few keys, and far from a factor.
        counts = [count(math.ceil(math.log2(n)), n, 31) for n in SIZES]
        assert exponent(SIZES, counts) < 0.1
        assert counts[-1] - counts[0] < 12 * 7
        by_samples = [count(16, 1 << 16, K) for K in SAMPLES]
        assert abs(exponent(SAMPLES[1:], np.diff(by_samples)) - 1) < 0.1  # differences: log n drops out

    def test_no_buckets_overflow_and_cost_grows_as_it_should(self):
        cost = []
        for n in SIZES[4:]:
            rng = np.random.default_rng(n)
            strategy = retrieval.NonAdaptiveBuckets(7, 1, **PLAIN)
            scores, exponential = rng.normal(size=n) * 2, rng.exponential(size=n)
            ids, requested, direct, failed = run(strategy, scores, exponential)
            assert not failed
            assert requested + direct < n  # r keys of a larger bucket
            np.testing.assert_array_equal(np.sort(ids), np.sort(np.argsort(-scores - exponential)[:8]))
            cost.append(requested + direct)
        assert abs(exponent(SIZES[4:], cost) - 0.5) < 0.1


@pytest.mark.slow
def test_softmax_lift_needs_as_many_keys_whatever_n_is():
    # ε⁻² keys for error ε: at K = 63 the denominator's root mean square error is at most 1 / √62 for every n; 40 draws
    # know it within a third.
    strategy = retrieval.SoftmaxLift(64, **PLAIN)
    errors = []
    for n in SIZES:
        keys = jnp.asarray(np.random.default_rng(n).normal(size=(n, 1)) * 2, jnp.float32)
        true = jax.nn.logsumexp(keys)
        error = []
        for seed in range(40):
            result = strategy.attend(jnp.ones((1, 1)), keys, keys, strategy.build(keys, jax.random.key(seed)))
            assert result.keys_requested[0] == 64
            error.append(float(jnp.expm1(result.log_denominator[0] - true)))
        errors.append(np.sqrt(np.mean(np.square(error))))
    assert np.max(errors) < 1.35 / 62**0.5
