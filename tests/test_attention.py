"""The public op against dense attention in float64: certified errors, exactness, ragged rows, edge cases,
transforms."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import certjax
from certjax import quantization
from tests.shared import inputs
from tests.shared.dense import dense64

KEY = jax.random.key(0)
SLOTS = 2048  # of every cache and every prefill: another shape is another program to compile


def _setup(family="gaussian", tokens=700, dtype="float32", scale=3.0):
    key, value, query = inputs.draw(family, seed=0, tokens=SLOTS, kv_heads=2, groups=2, head_dim=16)
    cache = _empty(dtype=dtype)
    return certjax.prefill(cache, key, value, lengths=np.array([tokens]), query=query), scale * query[:, -1:]


def _empty(batch=1, dtype="float32"):
    return certjax.init_cache(batch=batch, kv_heads=2, head_dim=16, capacity=SLOTS, dtype=dtype)


class CertifiedErrorTest(chex.TestCase):
    @parameterized.product(
        family=("gaussian", "outlier_channels", "duplicates"),
        measure=("value", "output", "denominator"),
        bounds=("scalar", "full"),
    )
    def test_error_is_within_the_bound(self, family, measure, bounds):
        cache, query = _setup(family, tokens=2048)
        config = certjax.Config(epsilon=0.3, delta=1e-3, measure=measure, bounds=bounds, always_sample=True)
        out, scale, norm = dense64(query, cache)
        sampled = 0
        for seed in range(5):
            result = certjax.decode_attention(query, cache, rng=jax.random.key(seed), config=config)
            c = jax.tree.map(lambda x: np.asarray(x)[0], result.certificate)
            error = np.linalg.norm(np.asarray(result.output, np.float64)[0, 0] - out, axis=-1)
            self.assertTrue(c.certified.all())
            sampled += (~c.exact).sum()
            np.testing.assert_array_less(error[c.exact], 1e-5 * (1 + scale[c.exact]))
            if measure == "denominator":
                relative = np.abs(np.expm1(c.log_normalizer - norm))
                np.testing.assert_array_less(relative, np.maximum(c.error_bound, 1e-5))
                self.assertLessEqual(c.error_bound.max(), 0.3 * 1.001)
            else:
                np.testing.assert_array_less(error[~c.exact], c.error_bound[~c.exact])
                allowed = 0.3 * (scale if measure == "value" else np.linalg.norm(out, axis=-1))
                largest = float(quantization.from_bf16_bits(cache.value_norm).max())  # rounding is relative to it
                np.testing.assert_array_less(c.error_bound[~c.exact], allowed[~c.exact] + 2e-3 * largest)
                np.testing.assert_array_less(c.value_scale_lower[~c.exact], scale[~c.exact] * (1 + 1e-5))
            self.assertTrue((c.keys_read <= c.candidates).all())
        if family == "gaussian" and measure != "output":
            self.assertGreater(sampled, 0)

    @parameterized.parameters("bfloat16", "float16", "float32")
    def test_every_storage_dtype(self, dtype):
        cache, query = _setup(tokens=1500, dtype=dtype)
        out, scale, _ = dense64(query, cache)
        result = certjax.decode_attention(query, cache, rng=KEY, config=certjax.Config(epsilon=0.3, always_sample=True))
        error = np.linalg.norm(np.asarray(result.output)[0, 0] - out, axis=-1)
        np.testing.assert_array_less(error, 0.3 * scale)
        self.assertFalse(bool(result.certificate.exact.all()))

    # Pitfall 33.
    def test_large_entries_in_float16_do_not_overflow(self):
        # q·k / 4 reaches 250 · 250 · 4 = 250 000, beyond float16's largest number.
        key = np.full((1, SLOTS, 2, 16), 250, np.float32)
        key[:, ::2] *= -1
        cache = certjax.prefill(_empty(dtype="float16"), key, np.ones_like(key), query=np.ones((1, SLOTS, 4, 16), "f4"))
        query = jnp.full((1, 1, 4, 16), 250, jnp.float16)
        for op in (
            lambda: certjax.decode_attention(query, cache, rng=KEY),
            lambda: certjax.dense_decode_attention(query, cache),
        ):
            np.testing.assert_allclose(np.asarray(op().output, np.float32), 1, rtol=1e-3)

    @pytest.mark.slow
    def test_unbiased_denominator_and_fresh_samples(self):
        cache, query = _setup(tokens=2048)
        config = certjax.Config(epsilon=0.4, measure="value", always_sample=True)
        keys = jax.random.split(KEY, 64)
        norms = jax.jit(
            jax.vmap(lambda k: certjax.decode_attention(query, cache, rng=k, config=config).certificate.log_normalizer)
        )(keys)
        ratio = np.exp(np.asarray(norms)[:, 0] - dense64(query, cache)[2])
        self.assertGreater(ratio.std(0).min(), 0)  # another key, another sample
        standard_error = ratio.std(0) / 8
        np.testing.assert_array_less(np.abs(ratio.mean(0) - 1), 5 * standard_error + 2e-3)

    def test_same_key_same_bits(self):
        cache, query = _setup(tokens=1500)
        step = lambda: certjax.decode_attention(
            query, cache, rng=KEY, config=certjax.Config(epsilon=0.3, always_sample=True)
        )
        chex.assert_trees_all_equal(step(), step())


class HintTest(chex.TestCase):
    def test_hint_saves_levels_not_truth(self):
        cache, query = _setup(tokens=2048)
        config = certjax.Config(epsilon=0.2, always_sample=True)
        first = certjax.decode_attention(query, cache, rng=KEY, config=config)
        second = certjax.decode_attention(query, cache, rng=jax.random.key(1), config=config, hint=first.hint)
        self.assertTrue(bool((first.hint.level > 0).all()))
        out, scale, _ = dense64(query, cache)
        error = np.linalg.norm(np.asarray(second.output)[0, 0] - out, axis=-1)
        np.testing.assert_array_less(error, 0.2 * scale)

    @parameterized.parameters(np.nan, np.inf, -np.inf, 1e9, -7.0)
    def test_a_senseless_hint_is_harmless(self, level):
        cache, query = _setup(tokens=1500)
        hint = certjax.Hint(jnp.full((1, 4), level, jnp.float32), jnp.zeros((1, 4), jnp.int32))
        out, scale, _ = dense64(query, cache)
        result = certjax.decode_attention(
            query, cache, rng=KEY, hint=hint, config=certjax.Config(epsilon=0.3, always_sample=True)
        )
        np.testing.assert_array_less(np.linalg.norm(np.asarray(result.output)[0, 0] - out, axis=-1), 0.3 * scale)
        self.assertTrue(bool(result.certificate.certified.all()))


class DenseTest(chex.TestCase):
    @parameterized.product(implementation=("native", "xla"), dtype=("float32", "bfloat16", "float16"))
    def test_dense_is_exact(self, implementation, dtype):
        _skip_without_extension(self, implementation)
        cache, query = _setup(dtype=dtype)
        result = certjax.dense_decode_attention(query, cache, implementation=implementation)
        out, _, norm = dense64(query, cache)
        np.testing.assert_allclose(np.asarray(result.output)[0, 0], out, atol=3e-6)
        np.testing.assert_allclose(result.certificate.log_normalizer[0], norm, atol=1e-5)
        self.assertTrue(bool(result.certificate.exact.all() & result.certificate.certified.all()))

    @parameterized.product(n=(0, 1, 3, 63, 64, 65, 127, 128, 129, 200), window=(0, 64))
    def test_short_contexts_are_exact(self, n, window):
        cache, query = _setup(tokens=n, scale=1.0)
        result = certjax.decode_attention(
            query, cache, rng=KEY, config=certjax.Config(window=window, always_sample=True)
        )
        self.assertTrue(bool(result.certificate.certified.all()))
        want = dense64(query, cache)[0] if n else np.zeros((4, 16))
        np.testing.assert_allclose(np.asarray(result.output)[0, 0], want, atol=0.05 if n > 130 else 1e-5)

    # Pitfall 35.
    @parameterized.product(span=(1, 4, 650), sinks=(3,))
    def test_attention_span_counts_exactly(self, span, sinks):
        cache, query = _setup()
        config = certjax.Config(epsilon=0.1, attention_span=span, sinks=sinks, always_sample=True)
        out, scale, _ = dense64(query, cache, span)
        for op in (
            lambda: certjax.dense_decode_attention(query, cache, config=config),
            lambda: certjax.decode_attention(query, cache, rng=KEY, config=config),
        ):
            error = np.linalg.norm(np.asarray(op().output)[0, 0] - out, axis=-1)
            np.testing.assert_array_less(error, 1e-5 if span < 200 else 0.1 * scale)


class RaggedTest(chex.TestCase):
    # Pitfall 28: a row without keys.
    def test_rows_do_not_see_each_other(self):
        key, value, query = inputs.draw("gaussian", seed=0, tokens=SLOTS, kv_heads=2, groups=2, head_dim=16, batch=3)
        cache = certjax.prefill(_empty(batch=3), key, value, lengths=np.array([9, SLOTS, 0]))
        keys = jax.random.split(KEY, 3)
        config = certjax.Config(epsilon=0.3, always_sample=True)
        together = certjax.decode_attention(query[:, -1:], cache, rng=keys, config=config)
        for b in range(3):
            one = jax.tree.map(lambda x, b=b: x[b : b + 1], (query[:, -1:], cache, keys))
            alone = certjax.decode_attention(one[0], one[1], rng=one[2], config=config)
            np.testing.assert_array_equal(together.certificate.keys_read[b], alone.certificate.keys_read[0])
            np.testing.assert_allclose(together.output[b], alone.output[0], atol=1e-5)
        self.assertTrue(bool((together.output[2] == 0).all()))
        self.assertTrue(bool(together.certificate.certified[2].all()))
        self.assertTrue(bool((together.certificate.log_normalizer[2] == -jnp.inf).all()))

    @parameterized.parameters("query", "key", "overflow")
    def test_a_bad_row_is_nan_and_never_certified(self, what):
        draws = inputs.draw("gaussian", seed=0, tokens=SLOTS, kv_heads=2, groups=2, head_dim=16, batch=3)
        key, value, query = (np.array(x) for x in draws)
        query = query[:, -1:]
        if what == "key":
            key[1, 17, 0, 0] = np.nan
        cache = certjax.prefill(_empty(batch=3), key, value, lengths=np.array([300, 300, 0]))
        if what == "query":
            query[1, 0, 3, 2] = np.inf
        if what == "overflow":
            cache = jax.jit(certjax.prefill)(cache, key, value, lengths=np.array([0, SLOTS - 299, 0]))
        query = jnp.asarray(query)
        for result in (
            certjax.decode_attention(query, cache, rng=KEY),
            certjax.dense_decode_attention(query, cache),
            certjax.dense_decode_attention(query, cache, implementation="xla"),
        ):
            self.assertTrue(bool(jnp.isnan(result.output[1]).all()))
            self.assertFalse(bool(result.certificate.certified[1].any()))
            self.assertTrue(bool((result.certificate.error_bound[1] == jnp.inf).all()))
            self.assertTrue(bool(jnp.isfinite(result.output[0]).all()))
            self.assertTrue(bool(result.certificate.certified[0].all()))

    @parameterized.product(key=(1.0, 1e25), value=(1.0, 3e38))
    def test_overflow_is_never_certified(self, key, value):
        keys = np.full((1, SLOTS, 2, 16), key, np.float32)
        keys[:, ::2] *= -1
        values = np.full_like(keys, value)
        ones = np.ones((1, SLOTS, 4, 16), np.float32)
        cache = certjax.prefill(_empty(), keys, values, lengths=np.array([200]), query=ones)
        query = jnp.full((1, 1, 4, 16), key)
        for result in (
            certjax.decode_attention(query, cache, rng=KEY),
            certjax.dense_decode_attention(query, cache),
            certjax.dense_decode_attention(query, cache, implementation="xla"),
        ):
            fine = np.isfinite(np.asarray(result.output)).all(-1)[:, 0]
            np.testing.assert_array_equal(result.certificate.certified, fine)
            np.testing.assert_array_equal(np.isfinite(result.certificate.error_bound), fine)
            if key * value == 1:
                self.assertTrue(fine.all())


class TransformTest(chex.TestCase):
    @pytest.mark.slow
    def test_vmap_equals_a_loop(self):
        cache, query = _setup(tokens=1024)
        keys = jax.random.split(KEY, 3)
        queries = jnp.stack([query, query * 0.5, -query])
        op = lambda q, k: certjax.decode_attention(
            q, cache, rng=k, config=certjax.Config(epsilon=0.3, always_sample=True)
        )
        together = jax.vmap(op)(queries, keys)
        for i in range(3):
            alone = op(queries[i], keys[i])
            np.testing.assert_array_equal(together.certificate.keys_read[i], alone.certificate.keys_read)
            np.testing.assert_allclose(together.output[i], alone.output, atol=2e-6)

    def test_epsilon_and_delta_may_be_traced_and_compile_once(self):
        cache, query = _setup(tokens=1024)
        chex.clear_trace_counter()

        @jax.jit
        @chex.assert_max_traces(n=1)
        def step(epsilon, delta):
            config = certjax.Config(epsilon=epsilon, delta=delta, always_sample=True)
            return certjax.decode_attention(query, cache, rng=KEY, config=config).certificate.keys_read

        few, many = step(0.4, 1e-2), step(0.25, 1e-4)
        self.assertLess(int(few.sum()), int(many.sum()))

    def test_a_decode_loop_compiles_once_and_updates_in_place(self):
        cache, query = _setup(tokens=640)
        chex.clear_trace_counter()

        @jax.jit
        @chex.assert_max_traces(n=1)
        def run(cache, rng):
            def body(i, carry):
                cache, hint, worst = carry
                token = jnp.full((1, 1, 2, 16), 0.1) * i.astype(jnp.float32)
                cache = certjax.append(cache, token, token)
                result = certjax.decode_attention(query, cache, rng=jax.random.fold_in(rng, i), hint=hint)
                return cache, result.hint, worst & result.certificate.certified.all()

            hint = certjax.init_hint(batch=1, heads=4)
            return jax.lax.fori_loop(0, 100, body, (cache, hint, jnp.bool_(True)))

        for seed in range(2):
            after, _, certified = run(cache, jax.random.key(seed))
        self.assertTrue(bool(certified))
        self.assertEqual(after.length.tolist(), [740])

    # Pitfall 40.
    @parameterized.parameters("native", "xla")
    def test_jit_gives_the_bits_of_eager_calls_in_bfloat16(self, implementation):
        _skip_without_extension(self, implementation)
        cache, query = _setup(dtype="bfloat16")
        op = lambda query, cache: certjax.dense_decode_attention(query, cache, implementation=implementation)
        eager = op(query.astype(jnp.bfloat16), cache)
        chex.assert_trees_all_equal(jax.jit(op)(query.astype(jnp.bfloat16), cache), eager, strict=True)
        self.assertEqual(eager.output.dtype, jnp.bfloat16)

    def test_gradients_are_refused(self):
        cache, query = _setup()
        for op in (
            lambda q: certjax.decode_attention(q, cache, rng=KEY).output.sum(),
            lambda q: certjax.dense_decode_attention(q, cache).output.sum(),
        ):
            with self.assertRaisesRegex(ValueError, "cannot be differentiated"):
                jax.grad(op)(query)

    def test_query_dtype_is_kept(self):
        cache, query = _setup()
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            result = certjax.decode_attention(query.astype(dtype), cache, rng=KEY)
            self.assertEqual(result.output.dtype, dtype)


class BadInputTest(chex.TestCase):
    def test_errors_name_the_argument(self):
        cache, query = _setup()
        hint = certjax.init_hint(batch=1, heads=3)
        cases = (
            ("query must be .*T=1", lambda: certjax.decode_attention(query[0], cache, rng=KEY)),
            ("query must be .*H=16", lambda: certjax.decode_attention(query[..., :8], cache, rng=KEY)),
            (
                "N=3 heads: must be a positive multiple of the cache's K=2",
                lambda: certjax.decode_attention(query[:, :, :3], cache, rng=KEY),
            ),
            ("query must be bfloat16", lambda: certjax.decode_attention(query.astype(jnp.int32), cache, rng=KEY)),
            ("rng must be a key", lambda: certjax.decode_attention(query, cache, rng=jnp.zeros((2,), jnp.uint32))),
            ("hint.level must be", lambda: certjax.decode_attention(query, cache, rng=KEY, hint=hint)),
            ("implementation must be", lambda: certjax.decode_attention(query, cache, rng=KEY, implementation="cuda")),
            ("epsilon must lie", lambda: certjax.Config(epsilon=0.0)),
            ("delta must lie", lambda: certjax.Config(delta=np.float32(5))),
            (
                r"config.epsilon must be a scalar, .* got shape \(2,\)",
                lambda: certjax.decode_attention(
                    query, cache, rng=KEY, config=certjax.Config(epsilon=jnp.full(2, 0.1))
                ),
            ),
            ("delta must lie", lambda: certjax.Config(delta=1.0)),
            ("measure must be one of", lambda: certjax.Config(measure="values")),
            ("bounds must be one of", lambda: certjax.Config(bounds="both")),
            ("window must be an integer", lambda: certjax.Config(window=-1)),
            ("attention_span must be an integer", lambda: certjax.Config(attention_span=0)),
            ("scale must be positive", lambda: certjax.Config(scale=-1.0)),
            ("delta_total must lie", lambda: certjax.delta_per_call(2, heads=1, layers=1, steps=1)),
            ("steps must be at least 1", lambda: certjax.delta_per_call(0.1, heads=1, layers=1, steps=0)),
        )
        for message, call in cases:
            with self.assertRaisesRegex(ValueError, message):
                call()

    def test_choice_can_be_queried(self):
        self.assertIn(certjax.choose_implementation(), ("native", "xla"))
        self.assertEqual(certjax.choose_implementation("dense"), "dense")

    def test_ledger(self):
        delta = certjax.delta_per_call(0.1, heads=9, layers=30, steps=50, batch=2)
        self.assertAlmostEqual(delta * 9 * 30 * 50 * 2, 0.1)
        self.assertEqual(certjax.delta_spent(delta, calls=0), 0)
        self.assertEqual(certjax.delta_spent(0.5, calls=9), 1)

    @pytest.mark.slow
    def test_every_knob_changes_something(self):
        cache, query = _setup(tokens=2048)
        base = certjax.Config(epsilon=0.3, always_sample=True)
        read = lambda c, hint=None: np.asarray(
            jax.tree.leaves(certjax.decode_attention(query, cache, rng=KEY, config=c, hint=hint).certificate.keys_read)[
                0
            ]
        )
        reference = read(base)
        import dataclasses

        for change in (
            {"epsilon": 0.2},
            {"delta": 1e-6},
            {"measure": "denominator"},
            {"bounds": "full"},
            {"window": 512},
            {"sinks": 300},
            {"attention_span": 1200},
            {"scale": 0.05},
        ):
            self.assertTrue((read(dataclasses.replace(base, **change)) != reference).any(), change)
        late = certjax.Hint(jnp.full((1, 4), 100.0), jnp.zeros((1, 4), jnp.int32))
        self.assertTrue((read(base, late) != reference).any())


def _skip_without_extension(test, implementation):
    from certjax import _ffi

    loaded, reason = _ffi.is_available()
    if implementation == "native" and not loaded:
        test.skipTest(f"the extension does not load: {reason}")
