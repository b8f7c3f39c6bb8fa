"""Codes, bounds and roundings: u ≥ s for every key, against float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

import certjax
from certjax import quantization
from certjax.cache import from_storage
from tests.shared import inputs

encode_blocks = jax.jit(quantization.encode_blocks)
score_bounds = jax.jit(quantization.score_bounds)


class ByteTest(chex.TestCase):
    def test_every_scale_byte_survives_the_round_trip(self):
        byte = jnp.arange(256, dtype=jnp.uint8)
        np.testing.assert_array_equal(quantization.encode_scale_up(quantization.decode_scale(byte)), byte)

    def test_range_of_the_steps(self):
        ends = quantization.decode_scale(jnp.array([0, 255], jnp.uint8))
        np.testing.assert_array_equal(ends, [2.0**-20, 1.875 * 2**11])

    def test_scale_rounds_up_by_at_most_one_mantissa_step(self):
        x = jnp.exp(jnp.linspace(-13, 8, 5000, dtype=jnp.float32))
        ratio = quantization.decode_scale(quantization.encode_scale_up(x)) / x
        self.assertGreaterEqual(float(ratio.min()), 1)
        self.assertLessEqual(float(ratio.max()), 1.1251)

    def test_extreme_scales_are_clipped_not_wrapped(self):
        x = jnp.array([0.0, 1e-38, 3840.1, 1e38, jnp.inf], jnp.float32)
        np.testing.assert_array_equal(quantization.encode_scale_up(x), [0, 0, 255, 255, 255])

    def test_bfloat16_bits_round_up(self):
        x = jnp.concatenate([jnp.exp(jnp.linspace(-60, 60, 4000, dtype=jnp.float32)), jnp.zeros(1)])
        up = quantization.from_bf16_bits(quantization.to_bf16_bits_up(x))
        self.assertTrue(bool((up >= x).all()))
        self.assertTrue(bool((up <= x * (1 + 2.0**-7)).all()))
        self.assertEqual(float(quantization.from_bf16_bits(quantization.to_bf16_bits_up(jnp.float32(jnp.inf)))), np.inf)


class NormTest(chex.TestCase):
    @parameterized.parameters(1e-30, 1e-20, 1e-15, 1e-8, 1.0, 1e8, 1e15, 1e20, 1e37)
    def test_norm_is_an_upper_bound_at_every_magnitude(self, size):
        x = (np.random.default_rng(0).normal(size=(50, 64)) * size).astype(np.float32)
        exact = np.linalg.norm(x.astype(np.float64), axis=-1)
        for got in (quantization.norm_up(jnp.asarray(x)), jax.jit(quantization.norm_up)(x)):
            self.assertTrue((np.asarray(got, np.float64) >= exact).all())
            self.assertTrue((np.asarray(got, np.float64) <= exact * 1.0001).all())


class LayoutTest(chex.TestCase):
    def test_nibbles_stand_where_the_page_says(self):
        H = 32
        key = np.zeros((1, 64, H), np.float32)
        key[0, :, :] = np.arange(H)[None, :] % 4  # range 0 … 3 is the same in all keys: one key is given 15 steps
        key[0, 37] = 15.0
        order = np.random.default_rng(0).permutation(H).astype(np.int32)
        out = encode_blocks(jnp.asarray(key), jnp.ones((H,)), jnp.asarray(order))
        codes = np.asarray(out["codes"])[0]  # [4, H/8, 64]
        scale = np.asarray(quantization.decode_scale(out["code_scale"]))[0]
        zero = np.asarray(out["code_zero"])[0]
        for i in (0, 15, 16, 37, 63):
            for position in range(H):
                half, rest = divmod(position, H // 2)
                line, b = divmod(rest, 4)
                byte = codes[i // 16, line, 4 * (i % 16) + b]
                code = (byte >> 4) if half else (byte & 15)
                self.assertLessEqual(
                    abs(scale[position] * (zero[position] + float(code)) - key[0, i, order[position]]),
                    scale[position] / 2,
                )

    @parameterized.parameters(1.0, 1e-3, 300.0)
    def test_residuals_are_half_a_step(self, size):
        key = (
            size * jax.random.normal(jax.random.key(0), (3, 64, 48))
            + size * 5 * jnp.sin(jnp.arange(48.0))[None, None, :]
        )
        out = encode_blocks(key[None], jnp.ones((1, 48)), jnp.arange(48)[None])
        self.assertLessEqual(float(out["residual_ratio"].max()), 1.0001)


class BoundTest(chex.TestCase):
    @parameterized.product(family=sorted(inputs.KEYS), dtype=("float32", "bfloat16", "float16"), head_dim=(16, 64))
    def test_bound_holds_for_every_key(self, family, dtype, head_dim):
        key, value, query = inputs.draw(family, seed=1, tokens=256, kv_heads=2, groups=3, head_dim=head_dim)
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=head_dim, capacity=256, dtype=dtype)
        cache = certjax.prefill(cache, key, value, query=query)
        last = query[:, -1].reshape(1, 2, 3, head_dim) * jnp.float32(head_dim**-0.5)
        _assert_bounds(cache, last)

    @given(st.integers(0, 10**6), st.floats(-30, 30), st.floats(0, 12))
    def test_bound_holds_for_shifted_and_spread_channels(self, seed, shift, spread):
        rng = np.random.default_rng(seed)
        key = rng.normal(size=(1, 64, 1, 16)) * np.exp(spread * rng.random((1, 1, 1, 16))) + shift * rng.normal(
            size=(1, 1, 1, 16)
        )
        cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=16, capacity=64, dtype="float32")
        cache = certjax.prefill(cache, jnp.asarray(key, jnp.float32), jnp.zeros((1, 64, 1, 16)))
        _assert_bounds(cache, jnp.asarray(rng.normal(size=(1, 1, 2, 16)), jnp.float32))

    def test_bound_is_tight_enough_to_be_useful(self):
        key, value, query = inputs.draw("gaussian", seed=0, tokens=256, kv_heads=2, groups=3, head_dim=64)
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=64, capacity=256, dtype="float32")
        cache = certjax.prefill(cache, key, value, query=query)
        _, half = score_bounds(query[:, -1].reshape(1, 2, 3, 64) / 8, cache)
        self.assertLess(float(half.mean()), 1.0)  # scores have standard deviation 1

    def test_clipped_outliers_stay_valid(self):
        key = jnp.ones((1, 64, 1, 16)).at[0, 3, 0, 5].set(3e38).at[0, 9, 0, 6].set(-3e5)
        cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=16, capacity=64, dtype="float32")
        cache = certjax.prefill(cache, key, key * 0)
        _assert_bounds(cache, jnp.full((1, 1, 1, 16), 1e-3))


def _assert_bounds(cache, query):
    estimate, half = (np.asarray(x, np.float64) for x in score_bounds(query, cache))
    key = np.asarray(from_storage(cache.key, cache.dtype), np.float64)
    exact = np.einsum("bkgh,bksh->bkgs", np.asarray(query, np.float64), key)
    used = np.asarray(jnp.einsum("bkgh,bksh->bkgs", query, from_storage(cache.key, cache.dtype)), np.float64)
    n = int(cache.length[0]) // 64 * 64
    for score in (exact, used):
        gap = (half - np.abs(score - estimate))[..., :n]
        assert not (gap < 0).any(), gap.min()  # inf half-widths give inf or NaN gaps, which bound everything
