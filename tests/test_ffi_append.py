"""The append of the extension against its definition, on every ISA level, and in place."""

import dataclasses
import functools
import re
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import certjax
from certjax import _ffi, quantization
from certjax.cache import from_storage, to_storage
from certjax.types import BLOCK
from tests.shared.ffi_cases import (
    ARRAYS,
    BLOCK_FIELDS,
    DTYPES,
    LEVELS,
    assert_same_bits,
    bf16,
    fill,
    make_cache,
    make_tokens,
    norm,
)


class AppendTest(chex.TestCase):
    @parameterized.product(dtype=DTYPES, shape=((16, 1e-3), (48, 1e3), (128, 1.0)))
    def test_matches_the_definition(self, dtype, shape):
        head_dim, scale = shape
        rng = np.random.default_rng(head_dim)
        cache = make_cache(rng, head_dim=head_dim, dtype=dtype)
        keys, values = make_tokens(rng, cache, 130, scale)
        new = fill(cache, keys, values)
        np.testing.assert_array_equal(new.length, [130, 130])
        np.testing.assert_array_equal(new.key[:, :, :130], jnp.moveaxis(keys, 0, 2))
        np.testing.assert_array_equal(new.value[:, :, :130], jnp.moveaxis(values, 0, 2))
        key, value = (from_storage(x[:, :, :130], dtype) for x in (new.key, new.value))
        blocks = key[:, :, : 2 * BLOCK].reshape(2, 2, 2, BLOCK, head_dim)
        coded = jax.jit(quantization.encode_blocks)(blocks, cache.channel_weight, cache.channel_order)
        for name in ("codes", "code_scale", "code_zero"):
            np.testing.assert_array_equal(getattr(new, name)[:, :, :2], coded[name], err_msg=name)
        np.testing.assert_array_equal(new.scale_max, coded["code_scale"].max(2))
        chex.assert_trees_all_close_ulp(new.residual_ratio[:, :, :2], coded["residual_ratio"], maxulp=4)

        residual = np.asarray(key[:, :, : 2 * BLOCK], np.float64) - self.decoded(new)
        truth = {
            "residual_norm": norm(np.asarray(cache.channel_weight, np.float64)[:, :, None] * residual),
            "value_size": norm(np.asarray(value, np.float64) - np.asarray(cache.value_center, np.float64)[:, :, None]),
            "value_norm": norm(value),
        }
        for name, true in truth.items():
            bits = np.asarray(getattr(new, name))[:, :, : true.shape[2]]
            assert (bf16(bits) >= true).all(), name
            nearest = np.asarray(quantization.to_bf16_bits_up(jnp.asarray(true, jnp.float32)))
            assert np.abs(bits.astype(int) - nearest).max() <= 1, name
        largest = norm(key).max(-1)
        assert (new.key_norm_max >= largest).all()
        assert (new.key_norm_max <= largest * (1 + 0.0001)).all()
        # What has not been finished is not coded.
        for name in BLOCK_FIELDS:
            tail = 2 * BLOCK if name == "residual_norm" else 2
            assert not np.asarray(getattr(new, name))[:, :, tail:].any(), name

    def decoded(self, cache):
        B, K, _, H = cache.shape
        low, high = (np.asarray(x[:, :, :2], np.float64) for x in quantization.unpack_codes(cache.codes))
        zero = np.asarray(cache.code_zero[:, :, :2], np.float64)[:, :, :, None]
        step = np.asarray(quantization.decode_scale(cache.code_scale[:, :, :2]), np.float64)[:, :, :, None]
        ordered = (step * (zero + np.concatenate([low, high], -1))).reshape(B, K, 2 * BLOCK, H)
        key = np.zeros_like(ordered)
        np.put_along_axis(key, np.asarray(cache.channel_order)[:, :, None], ordered, -1)
        return key

    @parameterized.product(dtype=DTYPES, level=LEVELS)
    def test_levels_give_the_same_bits(self, dtype, level):
        rng = np.random.default_rng(1)
        cache = make_cache(rng, head_dim=80, dtype=dtype)
        keys, values = make_tokens(rng, cache, 70)
        assert_same_bits(fill(cache, keys, values, isa=level), fill(cache, keys, values, isa="scalar"))

    @parameterized.parameters("bfloat16", "float32")
    def test_bounds_hold_at_extreme_magnitudes(self, dtype):
        rng = np.random.default_rng(2)
        cache = make_cache(rng, head_dim=16, dtype=dtype)
        for scale in (1e-41, 1e-30, 1e18, 1e37):
            keys, values = make_tokens(rng, cache, BLOCK, scale)
            new = fill(cache, keys, values)
            value = np.asarray(from_storage(new.value[:, :, :BLOCK], dtype), np.float64)
            assert (bf16(new.value_norm[:, :, :BLOCK]) >= norm(value)).all()
            key = np.asarray(from_storage(new.key[:, :, :BLOCK], dtype), np.float64)
            assert (np.asarray(new.key_norm_max, np.float64) >= norm(key).max(-1)).all()
            assert np.asarray(new.valid).all()

    @parameterized.parameters(*DTYPES)
    def test_refused_rows_change_nothing_but_valid(self, dtype):
        rng = np.random.default_rng(3)
        cache = make_cache(rng, batch=9, dtype=dtype, length=63)
        (key,), (value,) = make_tokens(rng, cache, 1)
        spoil = jnp.asarray([np.nan, np.inf, -np.inf], jnp.float32)
        bad = to_storage(spoil, dtype)
        key = key.at[1, 1, 5].set(bad[0]).at[2, 0, 31].set(bad[1])  # one head spoils the whole row
        value = value.at[3, 1, 0].set(bad[2])
        length = [63, 63, 63, 63, 192, -1, 193, 2**31 - 1, -(2**31)]
        cache = dataclasses.replace(cache, length=jnp.asarray(length, jnp.int32))
        new = _ffi.append(cache, key, value, jnp.ones(9, bool))
        np.testing.assert_array_equal(new.valid, [True] + 8 * [False])
        np.testing.assert_array_equal(new.length, [64, *length[1:]])

        def row(c, rows):
            return jax.tree.map(lambda x: x[rows], c)

        refused = slice(1, None)
        assert_same_bits(row(new, refused), row(cache, refused), [n for n in ARRAYS if n != "valid"])
        for name in (*BLOCK_FIELDS, "key", "value", "scale_max", "value_size", "value_norm", "key_norm_max"):
            assert (np.asarray(getattr(new, name))[0] != np.asarray(getattr(cache, name))[0]).any(), name

    def test_inactive_and_invalid_rows_are_left_alone(self):
        rng = np.random.default_rng(4)
        cache = make_cache(rng, batch=3, length=63)
        cache = dataclasses.replace(cache, valid=jnp.asarray([True, False, True]))
        (key,), (value,) = make_tokens(rng, cache, 1)
        nan = to_storage(jnp.asarray(jnp.nan), cache.dtype)
        new = _ffi.append(cache, key.at[0].set(nan), value, jnp.asarray([False, True, True]))
        np.testing.assert_array_equal(new.valid, [True, False, True])
        np.testing.assert_array_equal(new.length, [63, 63, 64])

        def row(c):
            return jax.tree.map(lambda x: x[:2], c)

        assert_same_bits(row(new), row(cache))

    def test_channel_order_out_of_range_is_harmless(self):
        rng = np.random.default_rng(5)
        cache = make_cache(rng, length=63)
        order = jnp.full_like(cache.channel_order, 2**31 - 1).at[:, 0].set(-(2**31))
        (key,), (value,) = make_tokens(rng, cache, 1)
        new = _ffi.append(dataclasses.replace(cache, channel_order=order), key, value, jnp.ones(2, bool))
        np.testing.assert_array_equal(new.length, [64, 64])

    def test_wrong_arguments(self):
        cache = make_cache(np.random.default_rng(0))
        token = jnp.zeros((2, 2, 32), jnp.uint16)
        on = jnp.ones(2, bool)
        with pytest.raises(ValueError, match=r"key must be uint16 \(2, 2, 32\): got float32"):
            _ffi.append(cache, token.astype(jnp.float32), token, on)
        with pytest.raises(ValueError, match=r"value must be uint16 \(2, 2, 32\): got uint16 \(2, 1, 32\)"):
            _ffi.append(cache, token, token[:, :1], on)
        with pytest.raises(ValueError, match=r"active must be bool \(2,\): got int32"):
            _ffi.append(cache, token, token, on.astype(jnp.int32))
        # The handler does not rely on these checks.
        broken = dataclasses.replace(cache, codes=cache.codes[..., :32])
        with pytest.raises(Exception, match="codes has another dtype or shape"):
            jax.block_until_ready(_ffi.append(broken, token, token, on).length)


class InPlaceTest(chex.TestCase):
    @parameterized.product(dtype=DTYPES, loop=("fori_loop", "while_loop"))
    def test_loops_never_copy_or_convert_a_cache(self, dtype, loop):
        rng = np.random.default_rng(0)
        cache = make_cache(rng, batch=1, dtype=dtype, capacity=4096)
        keys, values = make_tokens(rng, cache, 3)
        on = jnp.ones(1, bool)

        @functools.partial(jax.jit, donate_argnums=0)
        def run(cache):
            def step(i, cache):
                return _ffi.append(cache, keys[i], values[i], on)

            if loop == "fori_loop":
                return jax.lax.fori_loop(0, 3, step, cache)

            def more(carry):
                return carry[1].length[0] < 3

            return jax.lax.while_loop(more, lambda carry: (carry[0] + 1, step(*carry)), (0, cache))[1]

        text = run.lower(cache).compile().as_text()
        assert "certjax_append" in text
        big = {str(x.shape).strip("()").replace(" ", "") for x in (cache.key, cache.codes, cache.residual_norm)}
        for line in text.splitlines():
            made = re.search(r"= \(?\w+\[([\d,]*)\]\S* ([\w-]+)\(", line)
            if made and made[1] in big:
                assert made[2] in ("parameter", "get-tuple-element", "bitcast"), line
        before = [getattr(cache, name).unsafe_buffer_pointer() for name in ("key", "value", "codes")]
        new = run(cache)
        assert before == [getattr(new, name).unsafe_buffer_pointer() for name in ("key", "value", "codes")]
        assert cache.key.is_deleted()

    def test_without_donation_the_input_is_kept(self):
        rng = np.random.default_rng(1)
        cache = make_cache(rng, length=63)
        (key,), (value,) = make_tokens(rng, cache, 1)
        copy = jax.tree.map(lambda x: np.array(x), cache)
        on = jnp.ones(2, bool)
        eager, jitted = _ffi.append(cache, key, value, on), jax.jit(_ffi.append)(cache, key, value, on)
        assert_same_bits(cache, copy)
        assert_same_bits(eager, jitted)

    def test_time_does_not_grow_with_the_capacity(self):
        """Prints; the promise itself is the HLO's, tested above."""
        for capacity in (4 << 10, 256 << 10):
            rng = np.random.default_rng(2)
            cache = make_cache(rng, batch=1, kv_heads=1, head_dim=64, capacity=capacity)
            keys, values = make_tokens(rng, cache, 64)
            on = jnp.ones(1, bool)

            def step(i, cache):
                return _ffi.append(cache, keys[i % 64], values[i % 64], on)  # noqa: B023

            run = jax.jit(lambda cache: jax.lax.fori_loop(0, 1024, step, cache), donate_argnums=0)
            cache = jax.block_until_ready(run(cache))
            start = time.perf_counter()
            cache = jax.block_until_ready(run(cache))
            print(f"append at capacity {capacity}: {(time.perf_counter() - start) / 1024 * 1e6:.2f} µs")
            np.testing.assert_array_equal(cache.length, [2048])


def test_executions_of_one_program_do_not_share_descriptors():
    """Four threads append to caches of their own with one compiled program: tasks must not look at the call's frame."""
    rows, heads, head_dim = 128, 4, 64
    step = jax.jit(lambda c, k, v: certjax.append(c, k, v, implementation="native"), donate_argnums=0)

    def fresh():
        return certjax.init_cache(batch=rows, kv_heads=heads, head_dim=head_dim, capacity=64, dtype=jnp.float32)

    token = jnp.ones((rows, 1, heads, head_dim))
    step(fresh(), token, token)
    wrong = []

    def work(thread):
        for _ in range(20):
            cache = fresh()
            for t in range(4):
                new = jnp.full((rows, 1, heads, head_dim), 1000.0 * thread + t)
                cache = step(cache, new, -new)
            want = np.broadcast_to((1000 * thread + np.arange(4.0))[None, None, :, None], (rows, heads, 4, head_dim))
            wrong.append(int((np.asarray(cache.key)[:, :, :4] != want).sum()))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 80
    assert sum(wrong) == 0
