"""The extension's two calls against definitions in float64, on every ISA level, and under every transform."""

import dataclasses
import functools
import re
import subprocess
import sys
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from certjax import _ffi, quantization
from certjax.cache import from_storage, init_cache, to_storage
from certjax.types import BLOCK, KVCache

DTYPES = ("bfloat16", "float16", "float32")
LEVELS = _ffi.isa_levels()
BLOCK_FIELDS = ("codes", "code_scale", "code_zero", "residual_ratio", "residual_norm")
ARRAYS = tuple(f.name for f in dataclasses.fields(KVCache) if f.name != "dtype")


def make_cache(rng, *, batch=2, kv_heads=2, head_dim=32, capacity=192, dtype="bfloat16", length=0):
    """A cache with `length` random tokens (no metadata for them) and a calibration that is not the default."""
    cache = init_cache(batch=batch, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity, dtype=dtype)
    shape = (batch, kv_heads, head_dim)

    def fill(x):
        tokens = to_storage(jnp.asarray(rng.standard_normal((*shape[:2], length, head_dim)), jnp.float32), dtype)
        return x.at[:, :, :length].set(tokens)

    return dataclasses.replace(
        cache,
        key=fill(cache.key),
        value=fill(cache.value),
        channel_weight=jnp.asarray(np.exp(rng.standard_normal(shape)), jnp.float32),
        channel_order=jnp.asarray(rng.permuted(np.broadcast_to(np.arange(head_dim), shape), axis=-1), jnp.int32),
        value_center=jnp.asarray(rng.standard_normal(shape), jnp.float32),
        length=jnp.full((batch,), length, jnp.int32),
    )


def make_tokens(rng, cache, count, scale=1.0):
    """Keys and values [count, B, K, H] in the storage dtype; channels of very different sizes."""
    B, K, _, H = cache.shape
    sizes = scale * np.exp(rng.standard_normal(H))
    return [
        to_storage(jnp.asarray(rng.standard_normal((count, B, K, H)) * sizes + offset, jnp.float32), cache.dtype)
        for offset in (scale * rng.standard_normal(H), 0)
    ]


def fill(cache, keys, values, active=None, isa=None):
    """Appends all tokens in a compiled loop."""
    active = jnp.ones((cache.shape[0],), bool) if active is None else active

    def body(i, cache):
        return _ffi.append(cache, keys[i], values[i], active, isa=isa)

    return jax.jit(lambda cache: jax.lax.fori_loop(0, keys.shape[0], body, cache))(cache)


def make_query(rng, cache, group):
    B, K, _, H = cache.shape
    return jnp.asarray(rng.standard_normal((B, K, group, H)) / np.sqrt(H), jnp.float32)


def exact(query, cache, span=0):
    """Attention in float64."""
    _B, _K, _S, _H = cache.shape
    query = np.asarray(query, np.float64)
    key, value = (np.asarray(from_storage(x, cache.dtype), np.float64) for x in (cache.key, cache.value))
    out, lse = np.zeros(query.shape), np.full(query.shape[:3], -np.inf)
    for b, n in enumerate(np.asarray(cache.length)):
        first = max(0, n - span) if span else 0
        if n == first:
            continue
        score = np.einsum("kgh,kth->kgt", query[b], key[b, :, first:n])
        top = score.max(-1, keepdims=True)
        weight = np.exp(score - top)
        total = weight.sum(-1)
        out[b] = np.einsum("kgt,kth->kgh", weight, value[b, :, first:n]) / total[..., None]
        lse[b] = top[..., 0] + np.log(total)
    return out, lse


def bf16(bits):
    return np.asarray(quantization.from_bf16_bits(jnp.asarray(bits)), np.float64)


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


def assert_same_bits(a, b, names=ARRAYS):
    for name in names:
        x, y = (np.asarray(getattr(c, name)) for c in (a, b))
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"), err_msg=name)


class AppendTest(chex.TestCase):
    @parameterized.product(dtype=DTYPES, shape=((16, 1e-3), (48, 1e3), (64, 1.0), (128, 1.0)))
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


class DenseTest(chex.TestCase):
    @parameterized.product(dtype=DTYPES, shape=((64, 3), (128, 4), (16, 1), (48, 16), (512, 2)))
    def test_matches_float64(self, dtype, shape):
        head_dim, group = shape
        rng = np.random.default_rng(head_dim)
        cache = make_cache(rng, batch=3, head_dim=head_dim, dtype=dtype, length=130)
        cache = dataclasses.replace(cache, length=jnp.asarray([130, 0, 17], jnp.int32))
        query = make_query(rng, cache, group)
        for span in (0, 1, 7, 100, 5000):
            out, lse = _ffi.dense_decode(query, cache, span=span)
            true_out, true_lse = exact(query, cache, span)
            np.testing.assert_allclose(out, true_out, rtol=0, atol=5e-6)
            np.testing.assert_allclose(lse, true_lse, rtol=0, atol=5e-6)
            np.testing.assert_array_equal(out[1], 0)

    @parameterized.product(dtype=DTYPES, level=LEVELS)
    def test_levels_and_repeats_give_the_same_bits(self, dtype, level):
        rng = np.random.default_rng(6)
        cache = make_cache(rng, head_dim=48, dtype=dtype, capacity=3072, length=2500)
        query = 30 * make_query(rng, cache, 5)  # sharp: exercises the rescaling
        scalar = _ffi.dense_decode(query, cache, isa="scalar")
        for _ in range(2):
            for x, y in zip(_ffi.dense_decode(query, cache, isa=level), scalar, strict=True):
                np.testing.assert_array_equal(np.asarray(x).view(np.uint32), np.asarray(y).view(np.uint32))

    def test_long_sums_stay_accurate(self):
        rng = np.random.default_rng(7)
        n = 100_000
        cache = init_cache(batch=1, kv_heads=1, head_dim=16, capacity=n, dtype="float32")
        tokens = jnp.asarray(rng.uniform(0.5, 1.0, (2, 1, 1, n, 16)), jnp.float32)  # one sign: errors add up
        cache = dataclasses.replace(
            cache,
            key=cache.key.at[:, :, :n].set(tokens[0] / 10),
            value=cache.value.at[:, :, :n].set(tokens[1]),
            length=jnp.asarray([n], jnp.int32),
        )
        query = make_query(rng, cache, 2)
        out, lse = _ffi.dense_decode(query, cache)
        true_out, true_lse = exact(query, cache)
        assert np.abs(out - true_out).max() < 2e-06
        assert np.abs(lse - true_lse).max() < 2e-06

    def test_keys_beyond_the_length_are_not_used(self):
        rng = np.random.default_rng(8)
        cache = make_cache(rng, dtype="float32", length=100)
        query = make_query(rng, cache, 2)
        spoiled = dataclasses.replace(
            cache, key=cache.key.at[:, :, 100:].set(jnp.nan), value=cache.value.at[:, :, 100:].set(jnp.nan)
        )
        chex.assert_trees_all_equal(_ffi.dense_decode(query, cache), _ffi.dense_decode(query, spoiled))

    def test_bad_rows_give_nan_and_spoil_no_other(self):
        rng = np.random.default_rng(9)
        cache = make_cache(rng, batch=6, length=40)
        query = make_query(rng, cache, 3)
        good = _ffi.dense_decode(query, cache)
        cache = dataclasses.replace(
            cache,
            length=jnp.asarray([40, 40, -1, 193, 2**31 - 1, 40], jnp.int32),
            valid=jnp.asarray([True, False, True, True, True, True]),
        )
        query = query.at[5, 0, 1, 3].set(jnp.nan).at[5, 1, 2, 0].set(jnp.inf)
        out, lse = _ffi.dense_decode(query, cache)
        bad = np.zeros((6, 2, 3), bool)
        bad[1:5] = bad[5, 0, 1] = bad[5, 1, 2] = True
        np.testing.assert_array_equal(np.isnan(out), np.broadcast_to(bad[..., None], out.shape))
        np.testing.assert_array_equal(np.isnan(lse), bad)
        np.testing.assert_array_equal(np.asarray(out)[~bad], np.asarray(good[0])[~bad])

    def test_wrong_arguments(self):
        cache = make_cache(np.random.default_rng(0))
        query = jnp.zeros((2, 2, 3, 32))
        for wrong, message in (
            (query[0], r"query must be \[B=2, K=2, G, H=32\] with G from 1 to 16: got \(2, 3, 32\)"),
            (jnp.zeros((2, 2, 17, 32)), "G from 1 to 16"),
            (query[:1], r"query must be float32 \(2, 2, 3, 32\): got float32 \(1, 2, 3, 32\)"),
            (query.astype(jnp.bfloat16), "query must be float32"),
        ):
            with pytest.raises(ValueError, match=message):
                _ffi.dense_decode(wrong, cache)
        with pytest.raises(ValueError, match="span must be at least 0"):
            _ffi.dense_decode(query, cache, span=-1)
        odd = dataclasses.replace(cache, key=cache.key[..., :24], value=cache.value[..., :24])
        with pytest.raises(ValueError, match="head_dim must be a multiple of 16 between 16 and 512: got 24"):
            _ffi.dense_decode(query[..., :24], odd)

    def test_cannot_be_differentiated(self):
        cache = make_cache(np.random.default_rng(0), length=3)
        with pytest.raises(ValueError, match="certjax_dense_decode"):
            jax.grad(lambda q: _ffi.dense_decode(q, cache)[0].sum())(jnp.ones((2, 2, 3, 32)))


class TransformTest(chex.TestCase):
    """Both calls together: append, then attend."""

    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(10)
        self.cache = make_cache(rng, length=62)
        self.keys, self.values = make_tokens(rng, self.cache, 4)
        self.query = make_query(rng, self.cache, 3)
        self.on = jnp.ones(2, bool)

    def step(self, cache, i):
        cache = _ffi.append(cache, self.keys[i], self.values[i], self.on)
        return cache, _ffi.dense_decode(self.query, cache)

    def one_by_one(self):
        cache, outs = self.cache, []
        for i in range(4):
            cache, out = self.step(cache, i)
            outs.append(out)
        return cache, jax.tree.map(lambda *x: jnp.stack(x), *outs)

    def test_scan_and_cond(self):
        expected = self.one_by_one()

        def maybe(cache, i):
            def skip(cache):
                return (cache, (jnp.zeros(self.query.shape), jnp.zeros(self.query.shape[:3])))

            return jax.lax.cond(i < 9, lambda cache: self.step(cache, i), skip, cache)

        cache, outs = jax.jit(lambda cache: jax.lax.scan(maybe, cache, jnp.arange(4)))(self.cache)
        assert_same_bits(cache, expected[0])
        chex.assert_trees_all_equal(outs, expected[1])

    def test_two_equal_calls_in_one_program(self):
        def twice(cache):
            cache = _ffi.append(cache, self.keys[0], self.values[0], self.on)
            return _ffi.append(cache, self.keys[0], self.values[0], self.on)

        np.testing.assert_array_equal(jax.jit(twice)(self.cache).length, [64, 64])

    @chex.variants(with_jit=True, without_jit=True)
    def test_vmap(self):
        many = jax.tree.map(lambda x: jnp.stack([x, x]), self.cache)
        many = dataclasses.replace(many, length=many.length.at[1].set(5))

        def both(cache, key, value, query, on):
            cache = _ffi.append(cache, key, value, on)
            return cache, _ffi.dense_decode(query, cache)

        rows = [jax.tree.map(lambda x, i=i: x[i], many) for i in (0, 1)]
        loop = [both(row, self.keys[i], self.values[0], self.query, self.on) for i, row in enumerate(rows)]
        expected = jax.tree.map(lambda *x: jnp.stack(x), *loop)
        mapped = jax.vmap(both, in_axes=(0, 0, None, None, None))
        got = self.variant(mapped)(many, self.keys[:2], self.values[0], self.query, self.on)
        assert_same_bits(got[0], expected[0])
        chex.assert_trees_all_equal(got[1], expected[1])
        nested = jax.vmap(mapped, in_axes=(None, None, None, 0, None))
        queries = jnp.stack([self.query, -self.query])
        got = self.variant(nested)(many, self.keys[:2], self.values[0], queries, self.on)
        chex.assert_trees_all_equal(got[1][0][0], expected[1][0])
        assert_same_bits(jax.tree.map(lambda x: x[1], got[0]), expected[0])

    def test_shard_map_over_heads(self):
        mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        axes = {name: P() if name in ("length", "valid") else P(None, "heads") for name in ARRAYS}
        spec = dataclasses.replace(self.cache, **axes)

        def both(cache, key, value, query, on):
            cache = _ffi.append(cache, key, value, on)
            result = _ffi.dense_decode(query, cache)
            # Each shard has decided for its own heads: make the rows agree.
            length = jax.lax.pmax(cache.length, "heads")
            valid = jax.lax.pmin(cache.valid.astype(jnp.int32), "heads") > 0
            return dataclasses.replace(cache, length=length, valid=valid), result

        heads = P(None, "heads")
        sharded = jax.jit(
            jax.shard_map(both, mesh=mesh, in_specs=(spec, heads, heads, heads, P()), out_specs=(spec, heads))
        )
        args = (self.cache, self.keys[0], self.values[0], self.query, self.on)
        got = sharded(*args)
        assert "all-gather" not in sharded.lower(*args).compile().as_text()
        expected = self.step(self.cache, 0)
        assert_same_bits(got[0], expected[0])
        chex.assert_trees_all_equal(got[1], expected[1])

    def test_no_rows(self):
        empty = jax.tree.map(lambda x: x[:0], self.cache)
        new = _ffi.append(empty, self.keys[0, :0], self.values[0, :0], self.on[:0])
        assert new.key.shape == (0, 2, 192, 32)
        out, lse = _ffi.dense_decode(self.query[:0], new)
        assert (out.shape, lse.shape) == ((0, 2, 3, 32), (0, 2, 3))

    def test_debug_nans_mode(self):
        expected = self.step(self.cache, 0)
        with jax.debug_nans(True):
            got = self.step(self.cache, 0)
            broken = dataclasses.replace(self.cache, valid=jnp.zeros(2, bool))
            with pytest.raises(FloatingPointError):
                jax.block_until_ready(_ffi.dense_decode(self.query, broken))
        assert_same_bits(got[0], expected[0])
        chex.assert_trees_all_equal(got[1], expected[1])

    def test_traced_once(self):
        chex.clear_trace_counter()
        step = jax.jit(chex.assert_max_traces(lambda cache, i: self.step(cache, i), n=1))
        cache = self.cache
        for i in range(3):
            cache, _ = step(cache, jnp.asarray(i))
        np.testing.assert_array_equal(cache.length, [65, 65])


CONCURRENT = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cpus[: int(sys.argv[1])])
import dataclasses, hashlib
import jax, jax.numpy as jnp, numpy as np
from certjax import _ffi
from certjax.cache import init_cache
cache = init_cache(batch=1, kv_heads=4, head_dim=64, capacity=8192, dtype="float32")
key = jax.random.normal(jax.random.key(0), cache.key.shape)
cache = dataclasses.replace(cache, key=key, value=key, length=jnp.asarray([8000], jnp.int32))
queries = jax.random.normal(jax.random.key(1), (24, 1, 4, 2, 64))
many = jax.jit(lambda qs: [_ffi.dense_decode(q, cache)[0] for q in qs])
out = jnp.stack(many(list(queries)))
print(hashlib.sha256(np.asarray(out).tobytes()).hexdigest(), _ffi.thread_count())
"""


def test_many_calls_on_one_and_two_threads():
    """Neither hangs, and the results have the same bits whatever the number of threads."""
    outputs = []
    for cpus in (1, 2):
        command = [sys.executable, "-c", CONCURRENT, str(cpus)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stderr == ""
        outputs.append(done.stdout.split())
    assert outputs[0][0] == outputs[1][0]
    assert all(int(threads) >= 1 for _, threads in outputs)


def test_a_missing_extension_keeps_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "certjax._native", None)
    native, reason = _ffi._load()
    assert native is None
    assert "certjax._native cannot be imported" in reason
    monkeypatch.setattr(_ffi, "_native", None)
    monkeypatch.setattr(_ffi, "_reason", reason)
    assert _ffi.is_available() == (False, reason)
    assert _ffi.isa_levels() == ()
    cache = init_cache(batch=1, kv_heads=1, head_dim=16, capacity=64)
    with pytest.raises(ImportError, match="cannot be imported"):
        _ffi.dense_decode(jnp.zeros((1, 1, 1, 16)), cache)


def test_a_runtime_older_than_the_headers_is_named(monkeypatch):
    monkeypatch.setattr(_ffi, "_runtime_version", lambda: (0, 0))
    native, reason = _ffi._load()
    assert native is None
    assert re.search(r"built for XLA FFI 0\.\d+, the installed jaxlib has 0\.0: upgrade jaxlib", reason)


def test_the_machine_is_described():
    assert _ffi.is_available() == (True, "")
    assert _ffi._runtime_version() >= _ffi.build_info()["ffi_api_version"]
    assert _ffi.thread_count() >= 1
    assert _ffi.huge_pages() in ("always", "madvise", "never", "unknown")
