"""prefill and append: contents, chunks, ragged rows, in-place updates, bad input."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import certjax
from certjax.cache import from_storage
from tests.shared import inputs

METADATA = ("codes", "code_scale", "code_zero", "residual_ratio", "residual_norm", "value_size", "value_norm")


def _cache(capacity=256, batch=1, dtype="float32", head_dim=32):
    return certjax.init_cache(batch=batch, kv_heads=2, head_dim=head_dim, capacity=capacity, dtype=dtype)


def _tokens(tokens, batch=1, seed=0, head_dim=32):
    return inputs.draw("gaussian", seed=seed, tokens=tokens, kv_heads=2, groups=2, head_dim=head_dim, batch=batch)


def _assert_same(a, b, full_blocks):
    for name in METADATA:
        x, y = np.asarray(getattr(a, name)), np.asarray(getattr(b, name))
        per_key = name in ("residual_norm", "value_size", "value_norm")
        n = full_blocks * (64 if per_key else 1)
        np.testing.assert_array_equal(x[:, :, :n], y[:, :, :n], err_msg=name)
    for name in ("scale_max", "length", "valid", "channel_order", "value_center"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)


class PrefillTest(chex.TestCase):
    @parameterized.parameters("float32", "bfloat16", "float16")
    def test_holds_what_was_given(self, dtype):
        key, value, _ = _tokens(122)  # as many as elsewhere: another number is another program to compile
        cache = certjax.prefill(_cache(dtype=dtype), key, value)
        self.assertEqual(cache.length.tolist(), [122])
        for stored, given in ((cache.key, key), (cache.value, value)):
            got = from_storage(stored, dtype)[:, :, :122].swapaxes(1, 2)
            np.testing.assert_array_equal(got, given.astype(dtype).astype(jnp.float32))

    def test_chunks_equal_one_call(self):
        key, value, query = _tokens(256)
        whole = certjax.prefill(_cache(), key[:, :64], value[:, :64], query=query[:, :64])
        whole = certjax.prefill(whole, key[:, 64:], value[:, 64:])
        parts = certjax.prefill(_cache(), key[:, :64], value[:, :64], query=query[:, :64])
        at = 64
        for step in (1, 30, 33, 64, 5, 59):
            parts = certjax.prefill(parts, key[:, at : at + step], value[:, at : at + step])
            at += step
        np.testing.assert_array_equal(parts.key, whole.key)
        _assert_same(parts, whole, full_blocks=4)

    def test_ragged_rows_equal_rows_alone(self):
        key, value, query = _tokens(130, batch=3)
        lengths = jnp.array([130, 0, 77])
        together = certjax.prefill(_cache(batch=3), key, value, lengths=lengths, query=query)
        self.assertEqual(together.length.tolist(), [130, 0, 77])
        for b, n in ((0, 130), (2, 77)):
            alone = certjax.prefill(_cache(), key[b : b + 1, :n], value[b : b + 1, :n], query=query[b : b + 1, :n])
            row = jax.tree.map(lambda x, b=b: x[b : b + 1], together)
            np.testing.assert_array_equal(alone.key[:, :, :n], row.key[:, :, :n])
            np.testing.assert_allclose(alone.value_center, row.value_center, atol=1e-6)
            np.testing.assert_array_equal(alone.codes[:, :, : n // 64], row.codes[:, :, : n // 64])

    def test_prefill_up_to_the_last_slot(self):
        key, value, _ = _tokens(256)
        cache = certjax.prefill(_cache(), key[:, :122], value[:, :122])
        cache = certjax.prefill(cache, key[:, 122:], value[:, 122:])
        np.testing.assert_array_equal(cache.key.swapaxes(1, 2), key)

    def test_key_norm_is_an_upper_bound(self):
        key, value, _ = _tokens(122)
        cache = certjax.prefill(_cache(), key, value)
        norm = np.linalg.norm(np.asarray(key, np.float64), axis=-1).max(1)
        self.assertTrue((np.asarray(cache.key_norm_max) >= norm).all())


class AppendTest(chex.TestCase):
    @parameterized.product(implementation=("native", "xla"), dtype=("float32", "bfloat16", "float16"))
    def test_appending_equals_prefill(self, implementation, dtype):
        _skip_without_extension(self, implementation)
        key, value, query = _tokens(192)
        cache = certjax.prefill(_cache(dtype=dtype), key[:, :70], value[:, :70], query=query[:, :70])
        want = certjax.prefill(cache, key[:, 70:], value[:, 70:])

        @jax.jit
        def run(cache):
            def body(i, cache):
                one = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)
                return certjax.append(cache, one(key), one(value), implementation=implementation)

            return jax.lax.fori_loop(70, 192, body, cache)

        got = run(cache)
        np.testing.assert_array_equal(got.key, want.key)
        np.testing.assert_array_equal(got.value, want.value)
        for name in ("codes", "code_scale", "code_zero", "scale_max", "length", "valid"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        for name in ("residual_norm", "value_size", "value_norm"):  # one unit in the last place of bfloat16
            a, b = (np.asarray(getattr(x, name), np.int64) for x in (got, want))
            self.assertLessEqual(np.abs(a - b).max(), 1, name)
        chex.assert_trees_all_close(got.residual_ratio, want.residual_ratio, rtol=1e-5)

    # Pitfall 38: a cursor for the whole batch that is that of row 0.
    @parameterized.parameters("native", "xla")
    def test_every_row_goes_on_where_it_ended(self, implementation):
        _skip_without_extension(self, implementation)
        key, value, query = _tokens(9, batch=2)
        cache = certjax.prefill(_cache(batch=2), key, value, lengths=jnp.array([3, 9]))
        after = certjax.append(cache, 5 + key[:, :1], 5 + value[:, :1], implementation=implementation)
        self.assertEqual(after.length.tolist(), [4, 10])
        for b, n in enumerate((3, 9)):
            np.testing.assert_array_equal(after.key[b, :, :n], cache.key[b, :, :n])
            np.testing.assert_array_equal(after.key[b, :, n], 5 + key[b, 0])
            np.testing.assert_array_equal(after.value[b, :, n], 5 + value[b, 0])
            one = jax.tree.map(lambda x, b=b: x[b : b + 1], (query[:, -1:], after))
            alone = certjax.dense_decode_attention(*one).output[0]
            np.testing.assert_allclose(certjax.dense_decode_attention(query[:, -1:], after).output[b], alone, atol=1e-6)

    def test_a_row_filled_by_append_alone_is_the_same_natively(self):
        _skip_without_extension(self, "native")
        key, value, _ = _tokens(70)
        caches = []
        for implementation in ("native", "xla"):

            @jax.jit
            def run(cache, implementation=implementation):
                def body(i, cache):
                    one = lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1, axis=1)
                    return certjax.append(cache, one(key), one(value), implementation=implementation)

                return jax.lax.fori_loop(0, 70, body, cache)

            caches.append(run(_cache()))
        for name in ("key", "value_center", "channel_order", "channel_weight", "length"):
            np.testing.assert_array_equal(getattr(caches[0], name), getattr(caches[1], name), err_msg=name)
        for name in ("codes", "code_scale", "code_zero"):  # of the block that is full
            a, b = (getattr(cache, name)[:, :, :1] for cache in caches)
            np.testing.assert_array_equal(a, b, err_msg=name)
        a, b = (np.asarray(c.value_size, np.int64) for c in caches)
        self.assertLessEqual(np.abs(a - b).max(), 1)

    @parameterized.parameters("native", "xla")
    def test_inactive_rows_stay(self, implementation):
        _skip_without_extension(self, implementation)
        key, value, _ = _tokens(10, batch=2)
        cache = certjax.prefill(_cache(batch=2), key, value)
        after = certjax.append(cache, key[:, :1], value[:, :1], jnp.array([True, False]), implementation=implementation)
        self.assertEqual(after.length.tolist(), [11, 10])
        np.testing.assert_array_equal(after.key[1], cache.key[1])

    @parameterized.product(implementation=("native", "xla"), bad=(np.nan, np.inf, -np.inf), where=("key", "value"))
    def test_not_finite_marks_the_row_only(self, implementation, bad, where):
        _skip_without_extension(self, implementation)
        key, value, _ = _tokens(1, batch=2)
        x = {"key": key, "value": value}
        x[where] = x[where].at[1, 0, 1, 3].set(bad)
        cache = certjax.append(_cache(batch=2), x["key"], x["value"], implementation=implementation)
        self.assertEqual(cache.valid.tolist(), [True, False])
        self.assertEqual(cache.length.tolist(), [1, 0])

    @parameterized.parameters("native", "xla")
    def test_overflow_inside_jit_marks_the_row(self, implementation):
        _skip_without_extension(self, implementation)
        key, value, _ = _tokens(64)
        cache = certjax.prefill(_cache(capacity=64), key, value)
        step = jax.jit(lambda c: certjax.append(c, key[:, :1] + 1, value[:, :1], implementation=implementation))
        after = step(cache)
        self.assertEqual((after.valid.tolist(), after.length.tolist()), ([False], [64]))
        np.testing.assert_array_equal(after.key, cache.key)
        with self.assertRaisesRegex(ValueError, "exceed the cache's capacity of 64"):
            certjax.append(cache, key[:, :1], value[:, :1], implementation=implementation)

    @parameterized.product(implementation=("native", "xla"), dtype=("float32", "bfloat16"))
    def test_no_copy_or_convert_of_a_cache_in_a_loop(self, implementation, dtype):
        _skip_without_extension(self, implementation)
        cache = _cache(capacity=4096, dtype=dtype)
        token = jnp.ones((1, 1, 2, 32))

        def run(cache, steps):
            body = lambda _, c: certjax.append(c, token, token, implementation=implementation)
            return jax.lax.fori_loop(0, steps, body, cache)

        text = jax.jit(run, donate_argnums=0).lower(cache, 10).compile().as_text()
        shape = "[1,2,4096,32]"
        bad = [line for line in text.splitlines() if shape in line and (" copy(" in line or " convert(" in line)]
        self.assertEmpty(bad)


class BadInputTest(chex.TestCase):
    def test_errors_name_the_argument(self):
        cache = _cache()
        key, value, query = _tokens(4)
        cases = (
            ("key must be", lambda: certjax.prefill(cache, key[0], value)),
            ("value must be", lambda: certjax.prefill(cache, key, value[..., :16])),
            ("key must be .* got int32", lambda: certjax.prefill(cache, key.astype(jnp.int32), value)),
            ("same shape", lambda: certjax.prefill(cache, key, value[:, :3])),
            ("query must be", lambda: certjax.prefill(cache, key, value, query=query[:, :, :3])),
            ("lengths must be integers", lambda: certjax.prefill(cache, key, value, lengths=jnp.ones((1,)))),
            (r"lengths\[0\] must lie in", lambda: certjax.prefill(cache, key, value, lengths=jnp.array([5]))),
            ("capacity is 256", lambda: certjax.prefill(cache, *_tokens(300)[:2])),
            ("one token", lambda: certjax.append(cache, key, value)),
            ("active must be bool", lambda: certjax.append(cache, key[:, :1], value[:, :1], jnp.ones((1,)))),
            ("implementation must be", lambda: certjax.append(cache, key[:, :1], value[:, :1], implementation="cuda")),
            ("head_dim must be", lambda: _cache(head_dim=20)),
            ("dtype must be", lambda: _cache(dtype="int8")),
            ("capacity must be", lambda: _cache(capacity=0)),
        )
        for message, call in cases:
            with self.assertRaisesRegex(ValueError, message):
                call()

    # Pitfall 32.
    def test_group_heads_share_a_cache(self):
        # 32 query heads over 8 kv heads take 8 heads' worth of memory.
        cache = certjax.init_cache(batch=1, kv_heads=8, head_dim=64, capacity=1024, dtype="bfloat16")
        self.assertEqual(cache.key.nbytes, 8 * 1024 * 64 * 2)

    def test_metadata_read_per_key(self):
        cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=128, capacity=1024, dtype="bfloat16")
        names = ("codes", "code_scale", "code_zero", "residual_norm", "value_size")
        self.assertLessEqual(sum(getattr(cache, n).nbytes for n in names) / 1024, 72)

    def test_empty_batch(self):
        cache = _cache(batch=0)
        empty = jnp.zeros((0, 1, 2, 32))
        for implementation in ("xla", None):
            after = certjax.append(cache, empty, empty, implementation=implementation)
            chex.assert_trees_all_equal_shapes(after, cache)

    def test_fields_are_documented(self):
        for field in dataclasses.fields(certjax.KVCache):
            self.assertIn(f"{field.name}:", certjax.KVCache.__doc__)


def _skip_without_extension(test, implementation):
    from certjax import _ffi

    loaded, reason = _ffi.is_available()
    if implementation == "native" and not loaded:
        test.skipTest(f"the extension does not load: {reason}")
