"""The hash: uniform, independent across words, never 0; the logarithm at both ends."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

from certjax import perturbation


def _uniform(words, n):
    high, low = perturbation.hash_bits(jnp.asarray(words, jnp.uint32), jnp.arange(n, dtype=jnp.uint32))
    return ((np.asarray(high, np.uint64) << np.uint64(21)) + np.asarray(low, np.uint64) + 1).astype(
        np.float64
    ) * 2.0**-53


class HashTest(chex.TestCase):
    def test_mix_is_a_bijection_with_full_avalanche(self):
        x = jnp.arange(1 << 16, dtype=jnp.uint32) * jnp.uint32(65521)
        y = np.asarray(perturbation.mix(x))
        self.assertEqual(len(np.unique(y)), len(y))
        for bit in range(32):
            flipped = np.asarray(perturbation.mix(x ^ jnp.uint32(1 << bit))) ^ y
            share = np.unpackbits(flipped.view(np.uint8)).mean()
            self.assertAlmostEqual(share, 0.5, delta=0.01)

    def test_known_values(self):
        # Fixes the stream: a change of the hash would change every result.
        words = jnp.array([1, 2, 3, 4], jnp.uint32)
        high, low = perturbation.hash_bits(words, jnp.arange(3, dtype=jnp.uint32))

        def mix(x):
            for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
                x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
            return x ^ (x >> 16)

        self.assertEqual(high.tolist(), [mix(mix(i ^ 1) ^ 2) for i in range(3)])
        self.assertEqual(low.tolist(), [mix(mix(i ^ 3) ^ 4) >> 11 for i in range(3)])

    def test_uniform_and_independent(self):
        n = 1 << 18
        rng = np.random.default_rng(0)
        draws = [_uniform(rng.integers(0, 2**32, 4, dtype=np.uint32), n) for _ in range(6)]
        for u in draws:
            self.assertGreater(u.min(), 0)
            self.assertLessEqual(u.max(), 1)
            ordered = np.sort(u)
            distance = np.abs(ordered - (np.arange(n) + 0.5) / n).max() * np.sqrt(n)
            self.assertLess(distance, 2.2)  # Kolmogorov–Smirnov: probability 1e-4
            self.assertLess(abs(np.corrcoef(u[:-1], u[1:])[0, 1]) * np.sqrt(n), 5)
        correlations = np.corrcoef(draws)[np.triu_indices(len(draws), 1)]
        self.assertLess(np.abs(correlations).max() * np.sqrt(n), 5)

    def test_one_flipped_bit_of_a_word_gives_another_stream(self):
        n = 1 << 14
        u = _uniform([5, 6, 7, 8], n)
        for bit in range(0, 32, 5):
            v = _uniform([5, 6 ^ (1 << bit), 7, 8], n)
            self.assertLess(abs(np.corrcoef(u, v)[0, 1]) * np.sqrt(n), 5)


class ExponentialTest(chex.TestCase):
    def test_both_ends_against_float64(self):
        edge = np.array([0, 1, 2, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 2, 2**32 - 1], np.uint32)
        high = np.concatenate([edge, np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32)])
        for low in (0, 2**20, 2**21 - 1):
            got = np.asarray(
                perturbation.exponential(jnp.asarray(high), jnp.full(high.shape, low, jnp.uint32)), np.float64
            )
            u = (high.astype(object) * 2**21 + low + 1).astype(object)
            complement = np.array([float(2**53 - int(x)) * 2.0**-53 for x in u])
            direct = np.array([float(x) * 2.0**-53 for x in u])
            with np.errstate(divide="ignore"):
                want = np.where(high < 2**31, -np.log(direct), -np.log1p(-complement))
            np.testing.assert_allclose(got, want, rtol=5e-7, atol=0)
        self.assertLessEqual(float(perturbation.exponential(jnp.uint32(0), jnp.uint32(0))), 36.8)
        self.assertEqual(float(perturbation.exponential(jnp.uint32(2**32 - 1), jnp.uint32(2**21 - 1))), 0)

    def test_mean_is_one(self):
        words = jnp.array([[9, 8, 7, 6]], jnp.uint32)
        e = np.asarray(perturbation.exponentials(words, 1 << 18), np.float64)
        self.assertLess(abs(e.mean() - 1) * np.sqrt(e.size), 5)


class WordsTest(chex.TestCase):
    @parameterized.parameters(0, 1, 12345)
    def test_threefry_is_that_of_jax(self, seed):
        key = jax.random.key(seed)
        data = jax.random.key_data(key)
        for i in (0, 1, 7, 2**31):
            # fold_in is one block under the key: the counter is the number's own two words.
            want = jax.random.key_data(jax.random.fold_in(key, i))
            got = perturbation.threefry(data[0], data[1], jnp.uint32(0), jnp.uint32(i))
            np.testing.assert_array_equal(np.stack(got), want)

    @parameterized.parameters("threefry2x32", "rbg", "unsafe_rbg")
    def test_every_kind_of_key(self, impl):
        words = [np.asarray(perturbation.row_words(jax.random.key(s, impl=impl), 2, 3)) for s in (0, 1)]
        self.assertEqual(len(np.unique(np.stack(words))), 48)

    def test_rows_heads_and_keys_differ(self):
        words = np.asarray(perturbation.row_words(jax.random.key(0), 3, 4))
        chex.assert_shape(words, (3, 4, 4))
        self.assertEqual(len(np.unique(words)), words.size)
        other = np.asarray(perturbation.row_words(jax.random.key(1), 3, 4))
        self.assertFalse((words == other).any())

    def test_a_key_per_row_makes_rows_independent_of_the_batch(self):
        keys = jax.random.split(jax.random.key(0), 3)
        words = perturbation.row_words(keys, 3, 2)
        np.testing.assert_array_equal(words[1:2], perturbation.row_words(keys[1:2], 1, 2))

    def test_errors_name_the_argument(self):
        with self.assertRaisesRegex(ValueError, "rng must be a key made by jax.random.key"):
            perturbation.row_words(jnp.zeros((2,), jnp.uint32), 1, 1)
        with self.assertRaisesRegex(ValueError, "one key a row"):
            perturbation.row_words(jax.random.split(jax.random.key(0), 3), 2, 1)
