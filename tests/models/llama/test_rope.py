import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from hypothesis import given
from hypothesis import strategies as st

from certjax.models.llama import RopeConfig
from certjax.models.llama.rope import attention_factor, inverse_frequencies, rotary_tables, rotate

LLAMA31 = RopeConfig(
    theta=5e5, rope_type="llama3", factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeConfig(theta=1e4, rope_type="yarn", factor=4.0, original_max_positions=8192)
ROPES = {
    "default": RopeConfig(theta=1e5),
    "linear": RopeConfig(theta=1e4, rope_type="linear", factor=4.0),
    "llama3": LLAMA31,
    "yarn": YARN,
    "dynamic": RopeConfig(rope_type="dynamic", factor=2.0, original_max_positions=4096, context=16384),
    "longrope": RopeConfig(
        rope_type="longrope",
        factor=32.0,
        original_max_positions=4096,
        context=131072,
        short_factor=tuple(1 + j / 100 for j in range(64)),
        long_factor=tuple(1.0 + j for j in range(64)),
    ),
}


class FrequencyTest(parameterized.TestCase):
    def test_default_and_linear(self):
        expected = [1e4 ** (-2 * j / 64) for j in range(32)]
        np.testing.assert_allclose(inverse_frequencies(RopeConfig(), 64), expected, rtol=1e-15)
        np.testing.assert_allclose(inverse_frequencies(ROPES["linear"], 64), np.array(expected) / 4, rtol=1e-15)

    def test_llama3_bands(self):
        plain, scaled = inverse_frequencies(RopeConfig(theta=5e5), 128), inverse_frequencies(LLAMA31, 128)
        wavelength = 2 * math.pi / plain
        ratio = plain / scaled
        np.testing.assert_allclose(ratio[wavelength < 8192 / 4], 1, rtol=1e-12)
        np.testing.assert_allclose(ratio[wavelength > 8192], 8, rtol=1e-12)
        between = (wavelength > 8192 / 4) & (wavelength < 8192)
        share = (8192 / wavelength[between] - 1) / 3
        np.testing.assert_allclose(1 / ratio[between], share + (1 - share) / 8, rtol=1e-12)
        assert between.sum() > 2

    # Pitfall 12: a missing or wrong scaling is invisible on short prompts.
    def test_llama3_matters_at_long_range_only(self):
        # Mean agreement of phases with the wrong embedding, as measured: unscaled 3.1 (head_dim 128), 3.2 with the
        # factor of 3.1 (head_dim 64).
        llama32 = dataclasses.replace(LLAMA31, factor=32.0)
        for right, wrong, head_dim, agreements in (
            (LLAMA31, RopeConfig(theta=5e5), 128, (1.0, 0.769, 0.502)),
            (llama32, RopeConfig(theta=5e5), 64, (1.0, 0.764, 0.298)),
            (llama32, LLAMA31, 64, (1.0, 0.971, 0.706)),
        ):
            change = inverse_frequencies(wrong, head_dim) - inverse_frequencies(right, head_dim)
            for position, agreement in zip((16, 8192, 131072), agreements, strict=True):
                assert abs(np.cos(position * change).mean() - agreement) < 2e-3

    def test_yarn_bands_and_factor(self):
        plain, scaled = inverse_frequencies(RopeConfig(), 64), inverse_frequencies(YARN, 64)
        turns = 8192 * plain / (2 * math.pi)
        np.testing.assert_allclose(scaled[turns > 60], plain[turns > 60], rtol=1e-12)
        np.testing.assert_allclose(scaled[turns < 0.5], plain[turns < 0.5] / 4, rtol=1e-12)
        assert (np.diff(plain / scaled) >= -1e-12).all()
        assert abs(attention_factor(YARN) - (0.1 * math.log(4) + 1)) < 1e-12
        assert attention_factor(LLAMA31) == 1.0

    def test_dynamic_has_the_base_of_the_whole_context(self):
        plain, rope = inverse_frequencies(RopeConfig(), 64), ROPES["dynamic"]
        for context in (100, 4096):
            short = dataclasses.replace(rope, context=context)
            np.testing.assert_array_equal(inverse_frequencies(short, 64), plain)
        # 2 · 16384 / 4096 − 1 = 7: the fastest pair stays, the slowest turns 7 times slower.
        ratio = plain / inverse_frequencies(rope, 64)
        np.testing.assert_allclose(ratio, 7 ** (np.arange(0, 64, 2) / 62), rtol=1e-12)

    def test_longrope_chooses_by_the_whole_context(self):
        plain, rope = inverse_frequencies(RopeConfig(), 128), ROPES["longrope"]
        np.testing.assert_allclose(plain / inverse_frequencies(rope, 128), rope.long_factor, rtol=1e-12)
        short = dataclasses.replace(rope, context=4096)
        np.testing.assert_allclose(plain / inverse_frequencies(short, 128), rope.short_factor, rtol=1e-12)
        assert abs(attention_factor(rope) - math.sqrt(1 + 5 / 12)) < 1e-12  # 32 = 2⁵, 4096 = 2¹²
        assert attention_factor(dataclasses.replace(rope, attention_factor=1.25)) == 1.25
        assert attention_factor(dataclasses.replace(rope, factor=1.0)) == 1.0


class TablesTest(parameterized.TestCase):
    # Pitfall 16: angles in 16 bits lose the phase at long range.
    @parameterized.parameters(*ROPES)
    def test_accurate_at_every_position(self, name):
        rope, head_dim = dataclasses.replace(ROPES[name], angles="exact"), 128

        @given(st.lists(st.integers(0, 2**20), min_size=6, max_size=6))
        def check(some):
            positions = np.array([0, 1, 8192, 65535, 131071, 1048575, *some], np.int32)
            cos, sin = jax.jit(lambda p: rotary_tables(rope, head_dim, p))(positions[None])
            angle = positions[:, None].astype(np.float64) * inverse_frequencies(rope, head_dim)
            scale = attention_factor(rope)
            np.testing.assert_allclose(cos[0], np.cos(angle) * scale, atol=2e-6)
            np.testing.assert_allclose(sin[0], np.sin(angle) * scale, atol=2e-6)

        check()

    @parameterized.parameters(*ROPES)
    def test_reference_angles_are_float32_products(self, name):
        # What the published implementations compute: right to float32 rounding of the angle, half a step of 10⁵
        # radians.
        frequency = inverse_frequencies(ROPES[name], 128)
        for positions, error in ((np.arange(64), 1e-5), (np.arange(131000, 131072), 2e-2)):
            cos, _ = rotary_tables(ROPES[name], 128, jnp.asarray(positions, jnp.int32))
            off = np.abs(np.asarray(cos) - np.cos(positions[:, None] * frequency) * attention_factor(ROPES[name])).max()
            assert error / 20 < off + 1e-6 < error or off < 1e-6


class RotateTest(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_scores_depend_on_the_distance_alone(self):
        rng = np.random.default_rng(0)
        q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 64)), jnp.float32) for _ in range(2))

        rope = dataclasses.replace(LLAMA31, angles="exact")

        @self.variant
        def score(q_at, k_at):
            turned = [rotate(x, *rotary_tables(rope, 64, at[None, None])) for x, at in ((q, q_at), (k, k_at))]
            return (turned[0] * turned[1]).sum()

        near = score(jnp.int32(130), jnp.int32(100))
        far = score(jnp.int32(131060), jnp.int32(131030))
        other = score(jnp.int32(131060), jnp.int32(131029))
        assert abs(float(near) - float(far)) < 1e-4
        assert abs(float(other - far)) > 0.01

    # Pitfall 18, with the golden logits of both layouts in test_gguf_golden.py.
    def test_pairs_are_half_a_head_apart(self):
        x = jnp.zeros((1, 1, 1, 8)).at[..., 1].set(1.0)
        angle = jnp.full((1, 1, 4), jnp.pi / 2)
        np.testing.assert_allclose(
            rotate(x, jnp.cos(angle), jnp.sin(angle)), jnp.zeros_like(x).at[..., 5].set(1), atol=1e-6
        )
