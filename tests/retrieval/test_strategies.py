"""Strategies: what they return for each kind of context, and how they compare with dense attention."""

import dataclasses
import types

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax import retrieval
from tests.retrieval.test_oracles import ORACLES, make

LENGTH, H, G = 600, 8, 3

STRATEGIES = {
    "softmax_lift": retrieval.SoftmaxLift(32, window=64),
    "top_k": retrieval.TopK(32, window=64),
    "top_k_sampling": retrieval.TopKSampling(32, window=64),
    "adaptive_buckets": retrieval.AdaptiveBuckets(31, 2, window=64),
    "non_adaptive_buckets": retrieval.NonAdaptiveBuckets(31, 2, window=64),
}


class Stingy:
    """Returns one key fewer than it is asked for."""

    def build(self, points, queries=None):
        inner = retrieval.Flat().build(points)
        search = lambda queries, k: np.pad(inner.search(queries, k)[:, :-1], ((0, 0), (0, 1)), constant_values=-1)
        return types.SimpleNamespace(search=search)


def head(length=LENGTH, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(length, H)), jnp.float32) for _ in range(2)]


def query(seed=1, size=3.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(G, H)) * size, jnp.float32)


def dense(query, keys, values, length=None, scale=H**-0.5):
    keys, values, query = (np.asarray(x, np.float64) for x in (keys[:length], values[:length], query))
    scores = query @ keys.T * scale
    w = np.exp(scores - scores.max(1, keepdims=True))
    return w @ values / w.sum(1, keepdims=True), np.log(w.sum(1)) + scores.max(1)


def attend(strategy, query, keys, values, rng=0, length=None, **kwargs):
    index = strategy.build(keys, jax.random.key(rng), length=length, **kwargs)
    result = strategy.attend(query, keys, values, index, length=length)
    jax.block_until_ready(result)
    retrieval.release(index)
    return result


class EveryStrategyTest(chex.TestCase):
    @parameterized.product(name=list(STRATEGIES))
    def test_fields(self, name):
        keys, values = head()
        result = attend(STRATEGIES[name], query(), keys, values)
        chex.assert_shape(result.output, (G, H))
        chex.assert_shape(result.ids, (G, 32))
        for ids, weights in zip(np.asarray(result.ids), np.asarray(result.log_weights), strict=True):
            assert len(set(ids)) == 32
            assert ids.min() >= 1  # the sink and the window are not in the pool
            assert ids.max() < LENGTH - 64
            assert (weights > -np.inf).sum() == (31 if "lift" in name or "buckets" in name else 32)
        np.testing.assert_array_equal(result.keys_used, (np.asarray(result.log_weights) > -np.inf).sum(1))
        assert not result.failed.any()
        again = attend(STRATEGIES[name], query(), keys, values)
        chex.assert_trees_all_equal(result, again)

    @parameterized.product(name=list(STRATEGIES), length=(0, 80))
    def test_short_contexts_are_exact(self, name, length):
        # Up to `budget` keys outside the window every strategy reads all of them.
        keys, values = head()
        result = attend(STRATEGIES[name], query(), keys, values, length=length)
        if length == 0:
            np.testing.assert_array_equal(result.output, 0)
            return
        output, log_denominator = dense(query(), keys, values, length)
        np.testing.assert_allclose(result.output, output, atol=1e-5)
        np.testing.assert_allclose(result.log_denominator, log_denominator, atol=1e-5)

    @parameterized.product(name=list(STRATEGIES))
    def test_one_key_with_all_the_mass(self, name):
        keys, values = head()
        keys = keys.at[100].set(query()[0] * 20)
        result = attend(STRATEGIES[name], query(), keys, values)
        np.testing.assert_allclose(result.output[0], values[100], atol=1e-5)

    @parameterized.product(name=list(STRATEGIES))
    def test_equal_keys(self, name):
        keys, values = head()
        keys = jnp.broadcast_to(keys[:1], keys.shape)
        result = attend(STRATEGIES[name], query(), keys, values)
        assert np.isfinite(result.output).all()
        for ids in np.asarray(result.ids):
            assert len(set(ids)) == 32

    @parameterized.product(name=list(STRATEGIES))
    def test_scores_of_minus_infinity_carry_nothing(self, name):
        keys, values = head()
        keys = jnp.abs(keys)
        forbidden = np.arange(LENGTH) % 2 == 0
        keys = jnp.where(forbidden[:, None], -3e38, keys)
        result = attend(STRATEGIES[name], jnp.ones((G, H)), keys, values)
        assert np.isfinite(result.output).all()
        used = np.asarray(result.ids)[np.asarray(result.log_weights) > -np.inf]
        assert (used % 2 == 1).all()

    @parameterized.product(name=list(STRATEGIES))
    def test_nan_stays_in_its_row(self, name):
        keys, values = head()
        result = attend(STRATEGIES[name], query().at[1].set(jnp.nan), keys, values)
        want = attend(STRATEGIES[name], query(), keys, values)
        assert np.isnan(result.output[1]).all()
        np.testing.assert_array_equal(result.output[::2], want.output[::2])
        np.testing.assert_array_equal(result.failed, [False, True, False])

    @parameterized.product(name=list(ORACLES), strategy=("softmax_lift", "adaptive_buckets"))
    def test_queries_that_are_not_finite(self, name, strategy):
        # With neither sinks nor window, nothing may be retrieved that would make the row NaN.
        oracle, _ = make(name)
        keys, values = head()
        strategy = dataclasses.replace(STRATEGIES[strategy], window=0, sinks=0)
        index = strategy.build(keys, jax.random.key(0), oracle, queries=query())
        result = strategy.attend(query().at[0, 2].set(np.nan).at[2, 1].set(-np.inf), keys, values, index)
        want = strategy.attend(query(), keys, values, index)
        retrieval.release(index)
        assert np.isnan(result.output[::2]).all()
        assert np.isnan(result.log_denominator[::2]).all()
        assert result.failed[::2].all()
        chex.assert_trees_all_equal(*(jax.tree.map(lambda x: x[1], x) for x in (result, want)))

    @parameterized.product(name=list(STRATEGIES))
    def test_keys_beyond_the_length_carry_nothing(self, name):
        keys, values = head()
        strategy = STRATEGIES[name]
        index = strategy.build(keys, jax.random.key(0))
        attend_to = jax.jit(lambda length: strategy.attend(query(), keys, values, index, length=length))
        for length in (index.stop - 1, 300):
            result = attend_to(length)
            assert result.failed.all()
            used = np.asarray(result.ids)[np.asarray(result.log_weights) > -np.inf]
            assert len(used) > 0
            assert used.max() < length
            with pytest.raises(ValueError, match=f"where keys are indexed: got {length}"):
                strategy.attend(query(), keys, values, index, length=length)
        assert not attend_to(index.stop).failed.any()
        retrieval.release(index)

    @parameterized.product(name=list(STRATEGIES))
    def test_oracles_that_return_too_little_are_noticed(self, name):
        keys, values = head()
        result = attend(STRATEGIES[name], query(), keys, values, oracle=Stingy())
        assert result.failed.all()

    @parameterized.parameters(("softmax_lift", jnp.bfloat16), ("adaptive_buckets", jnp.float16))
    def test_16_bits(self, name, dtype):
        keys, values = (x.astype(dtype) for x in head())
        result = attend(STRATEGIES[name], query().astype(dtype), keys, values)
        assert result.output.dtype == dtype
        wide = attend(STRATEGIES[name], *(x.astype(jnp.float32) for x in (query().astype(dtype), keys, values)))
        np.testing.assert_array_equal(result.ids, wide.ids)
        np.testing.assert_array_equal(result.output, wide.output.astype(dtype))

    @parameterized.parameters("softmax_lift", "top_k_sampling", "adaptive_buckets")
    def test_inside_compiled_loops_and_vmap(self, name):
        keys, values = head()
        strategy = STRATEGIES[name]
        index = strategy.build(keys, jax.random.key(0))
        queries = jnp.stack([query(seed) for seed in range(3)])

        @jax.jit
        def loop(index, queries):
            step = lambda carry, q: (carry, strategy.attend(q, keys, values, index).output)
            return jax.lax.scan(step, 0, queries)[1]

        want = jnp.stack([strategy.attend(q, keys, values, index).output for q in queries])
        np.testing.assert_allclose(loop(index, queries), want, atol=1e-6)
        batched = jax.vmap(lambda q: strategy.attend(q, keys, values, index).output)(queries)
        np.testing.assert_allclose(batched, want, atol=1e-6)
        retrieval.release(index)

    @parameterized.parameters("softmax_lift", "top_k_sampling")  # edges of buckets depend on the first build
    def test_append_is_a_build(self, name):
        keys, values = head()
        strategy = STRATEGIES[name]
        index = strategy.build(keys, jax.random.key(0), length=65)  # an empty pool
        assert strategy.append(index, keys, length=60) is index
        for length in (300, LENGTH):
            index = strategy.append(index, keys, length=length)
        got = strategy.attend(query(), keys, values, index)
        want = attend(strategy, query(), keys, values)
        np.testing.assert_array_equal(got.ids, want.ids)
        np.testing.assert_allclose(got.output, want.output, atol=1e-6)

    @parameterized.parameters("softmax_lift", "top_k_sampling", "adaptive_buckets")
    def test_newer_tokens_are_exact_until_they_are_appended(self, name):
        keys, values = head()
        strategy = STRATEGIES[name]
        index = strategy.build(keys, jax.random.key(0), length=66)
        attend_to = jax.jit(lambda length: strategy.attend(query(), keys, values, index, length=length).output)
        for length in (70, 500):
            np.testing.assert_allclose(attend_to(length), dense(query(), keys, values, length)[0], atol=1e-5)
        retrieval.release(index)

    @parameterized.parameters("softmax_lift", "top_k", "top_k_sampling")
    def test_an_exact_oracle_outside_jax_gives_the_same(self, name):
        keys, values = head()
        strategy = STRATEGIES[name]
        oracle = retrieval.MLANN(oversample=40, neighbors=LENGTH, leaf=1, depth=2)  # all points are candidates
        index = strategy.build(keys, jax.random.key(0), oracle, length=65, queries=query())  # an empty pool
        empty = strategy.attend(query(), keys[:65], values[:65], index)
        np.testing.assert_array_equal(empty.ids, -1)
        np.testing.assert_allclose(empty.output, dense(query(), keys, values, 65)[0], atol=1e-5)
        for length in (300, LENGTH):
            index = strategy.append(index, keys, length=length)
        got = strategy.attend(query(), keys, values, index)
        want = attend(strategy, query(), keys, values)
        np.testing.assert_array_equal(np.sort(got.ids, 1), np.sort(want.ids, 1))
        np.testing.assert_allclose(got.output, want.output, atol=1e-5)
        np.testing.assert_array_equal(got.keys_requested, want.keys_requested)
        retrieval.release(index)

    def test_scale(self):
        keys, values = head()
        strategy = retrieval.SoftmaxLift(200, window=64, scale=0.11)
        output, log_denominator = dense(query(), keys, values, scale=0.11)
        result = attend(strategy, query(), keys, values)
        np.testing.assert_allclose(result.log_denominator, log_denominator, atol=0.3)
        assert np.abs(result.output - output).max() < 0.3

    def test_wrong_arguments(self):
        keys, values = head()
        strategy = STRATEGIES["top_k"]
        index = strategy.build(keys, jax.random.key(0))
        with pytest.raises(ValueError, match=r"keys must be those of one kv head, \[S, H\]: got shape"):
            strategy.build(keys[None], jax.random.key(0))
        with pytest.raises(ValueError, match=r"query must be \[G, H\] and keys \[S, H\]: got"):
            strategy.attend(query()[0], keys, values, index)
        with pytest.raises(ValueError, match="at least 536"):
            strategy.attend(query(), keys[:300], values[:300], index)
        with pytest.raises(ValueError, match="budget must be an integer of at least 1: got 0"):
            retrieval.TopK(0)
        with pytest.raises(ValueError, match="budget must be at least 2, as one key is the threshold"):
            retrieval.SoftmaxLift(1)
        with pytest.raises(ValueError, match="samples must be an integer of at least 1: got 0"):
            retrieval.AdaptiveBuckets(0)
        with pytest.raises(ValueError, match="window must be an integer of at least 0: got -1"):
            retrieval.SoftmaxLift(window=-1)
        with pytest.raises(ValueError, match="scale must be positive and finite"):
            retrieval.SoftmaxLift(scale=0.0)


class EstimatorsTest(chex.TestCase):
    @parameterized.parameters("softmax_lift", "top_k_sampling")
    def test_numerator_and_denominator_are_unbiased(self, name):
        keys, values = head()
        q = query(size=2.0)[:1]
        strategy = STRATEGIES[name]

        @jax.jit
        @jax.vmap
        def once(rng):
            exponentials = jax.random.exponential(rng, (LENGTH - 65,))
            points = jnp.concatenate([keys[1:-64], exponentials[:, None] * H**0.5], 1)
            index = retrieval.Index(
                points=points if name == "softmax_lift" else points[:, :-1],
                handle=None,
                exponentials=exponentials,
                order=strategy._order(exponentials),
                rng=rng,
                start=1,
                stop=LENGTH - 64,
            )
            result = strategy.attend(q, keys, values, index)
            denominator = jnp.exp(result.log_denominator)
            return denominator[0], (result.output * denominator[:, None])[0]

        denominator, numerator = (np.asarray(x, np.float64) for x in once(jax.random.split(jax.random.key(0), 4000)))
        output, log_denominator = dense(q, keys, values)
        for x, want in ((denominator, np.exp(log_denominator)[0]), (numerator, (output * np.exp(log_denominator))[0])):
            half = 4.5 * x.std(0) / np.sqrt(len(x))
            assert (np.abs(x.mean(0) - want) <= half + 1e-5 * np.abs(want)).all()

    def test_top_k_is_attention_over_its_keys(self):
        keys, values = head()
        result = attend(STRATEGIES["top_k"], query(), keys, values)
        scores = np.asarray(query(), np.float64) @ np.asarray(keys, np.float64).T
        for g in range(G):
            top = 1 + np.argsort(-scores[g, 1:-64])[:32]
            np.testing.assert_array_equal(np.sort(result.ids[g]), np.sort(top))
            chosen = np.r_[0, top, LENGTH - 64 : LENGTH]
            np.testing.assert_allclose(
                result.output[g], dense(query()[g : g + 1], keys[chosen], values[chosen])[0][0], atol=1e-5
            )

    @parameterized.parameters("flat", "faiss_flat")
    def test_top_k_sampling_of_one_key_asks_for_none(self, name):
        keys, values = head()
        result = attend(retrieval.TopKSampling(1, window=64), query(), keys, values, oracle=make(name)[0])
        np.testing.assert_array_equal(result.keys_requested, 0)
        np.testing.assert_array_equal(result.keys_used, 1)
        assert not result.failed.any()
        assert np.isfinite(result.output).all()

    def test_top_k_sampling_counts(self):
        keys, values = head()
        result = attend(STRATEGIES["top_k_sampling"], query(), keys, values)
        np.testing.assert_array_equal(result.keys_requested, 16)
        np.testing.assert_array_equal(result.keys_direct, 16)
        scores = np.einsum("gh,gmh->gm", query(), np.asarray(keys)[np.asarray(result.ids)]) * H**-0.5
        factor = np.asarray(result.log_weights) - scores
        np.testing.assert_allclose(factor[:, :16], 0, atol=1e-5)
        np.testing.assert_allclose(factor[:, 16:], np.log((LENGTH - 65 - 16) / 16), atol=1e-5)

    def test_softmax_lift_beats_the_others_where_many_keys_matter(self):
        keys, values = head(4096)
        q, error = query(size=1.0), {}
        values = values + 3 * keys  # values that go with scores: what is left out biases the output
        output, _ = dense(q, keys, values)
        for strategy in (retrieval.SoftmaxLift(window=64), retrieval.TopK(window=64)):
            got = np.stack([attend(strategy, q, keys, values, rng).output for rng in range(4)])
            error[type(strategy)] = np.sqrt(((got - output) ** 2).mean())
        assert error[retrieval.SoftmaxLift] < 0.5 * error[retrieval.TopK]


@hypothesis.given(st.integers(0, 2**31), st.floats(0.1, 20))
@hypothesis.settings(max_examples=15)
def test_retrieved_weights_are_never_below_the_true_ones(seed, size):
    keys, values = head(seed=seed)
    q = query(seed, size)
    result = attend(STRATEGIES["softmax_lift"], q, keys, values, rng=seed)
    scores = np.einsum("gh,gmh->gm", q, np.asarray(keys)[np.asarray(result.ids)]) * H**-0.5
    weights = np.asarray(result.log_weights)
    used = weights > -np.inf
    want = np.maximum(scores, np.asarray(result.log_threshold)[:, None])
    np.testing.assert_allclose(weights[used], want[used], rtol=1e-4, atol=1e-4)
    assert (used.sum(1) == 31).all()
