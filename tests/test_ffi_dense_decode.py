"""Dense decoding in the extension against float64, on every ISA level."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax import _ffi
from certjax.cache import init_cache
from tests.shared.ffi_cases import (
    DTYPES,
    LEVELS,
    exact,
    make_cache,
    make_query,
)


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
