"""Values and scores far from 1: no square may flush to zero or overflow into a false certificate."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import certjax
from tests.shared import inputs
from tests.shared.dense import dense64

KEY = jax.random.key(0)


class MagnitudeTest(chex.TestCase):
    @parameterized.product(size=(1e-30, 1e-20, 1e-13, 1e-6, 1e6, 1e13, 1e18, 1e20, 1e28), measure=("value", "output"))
    def test_values_of_every_magnitude(self, size, measure):
        key, value, query = inputs.draw("gaussian", seed=0, tokens=2048, kv_heads=2, groups=2, head_dim=16)
        value = value * size
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=16, capacity=2048, dtype="float32")
        cache = certjax.prefill(cache, 0.3 * key, value)
        config = certjax.Config(epsilon=0.3, measure=measure, always_sample=True)
        result = certjax.decode_attention(query[:, -1:], cache, rng=KEY, config=config)
        c = jax.tree.map(lambda x: np.asarray(x, np.float64)[0], result.certificate)
        out, scale, _ = dense64(query[:, -1:], cache)
        error = np.linalg.norm(np.asarray(result.output, np.float64)[0, 0] - out, axis=-1)
        allowed = 0.3 * (scale if measure == "value" else np.linalg.norm(out, axis=-1))
        self.assertTrue((c.certified == 1).all())
        self.assertTrue((error <= allowed).all())
        self.assertTrue((c.value_scale_lower <= scale * (1 + 1e-5)).all())
        if measure == "value" and 1e-25 < size < 1e25:
            self.assertTrue((c.exact == 0).all())  # the same head in other units
            self.assertTrue((error <= c.error_bound).all())

    @parameterized.parameters(30.0, 44.8, 46.0, 60.0, 200.0)
    def test_a_scan_that_overshoots_far(self, size):
        # One key's estimate is far above every true score, so all true weights are tiny against it.
        rng = np.random.default_rng(0)
        key = np.zeros((1, 2048, 2, 16), np.float32)
        key[:, 1024:1040, :, 0] = -28
        key[:, 1050, :, 0], key[:, 1050, :, 1] = 1.01, -1.01
        value = jnp.asarray(rng.normal(size=key.shape) + 1.5, jnp.float32)
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=16, capacity=2048, dtype="float32")
        cache = certjax.prefill(cache, jnp.asarray(key), value)
        query = jnp.zeros((1, 1, 4, 16)).at[..., :2].set(size)
        out, scale, _ = dense64(query * 4, cache)  # scale 1 instead of 1/4
        for seed in range(4):
            config = certjax.Config(epsilon=0.02, scale=1.0)
            result = certjax.decode_attention(query, cache, rng=jax.random.key(seed), config=config)
            error = np.linalg.norm(np.asarray(result.output, np.float64)[0, 0] - out, axis=-1)
            self.assertTrue(bool(result.certificate.certified.all()))
            np.testing.assert_array_less(error, 0.02 * scale)

    @parameterized.product(tiny=(1e-5, 1e-7), implementation=("native", "xla"))
    def test_a_centre_far_larger_than_the_values(self, tiny, implementation):
        # The first prefill fixes a centre of norm 3; later values are tiny, and only they have weight: sums over
        # v − c0 then err by far more than ε M.
        rng = np.random.default_rng(0)
        query = rng.normal(size=16)
        value = tiny * rng.normal(size=(2048, 16))
        key = 0.3 * rng.normal(size=(2048, 16))
        value[:64] = 0.7 * rng.normal(size=16)
        key[:64], key[-64:] = (x * 4 * query / (query @ query) for x in (-60, 20))
        spread = lambda x: jnp.asarray(np.broadcast_to(x[None, :, None], (1, 2048, 2, 16)), jnp.float32)
        key, value = spread(key), spread(value)
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=16, capacity=2048, dtype="float32")
        cache = certjax.prefill(cache, key[:, :64], value[:, :64])
        cache = certjax.prefill(cache, key[:, 64:], value[:, 64:])
        query = jnp.asarray(np.broadcast_to(query, (1, 1, 4, 16)), jnp.float32)
        config = certjax.Config(epsilon=0.3, always_sample=True)
        result = certjax.decode_attention(query, cache, rng=KEY, config=config, implementation=implementation)
        out, scale, _ = dense64(query, cache)
        error = np.linalg.norm(np.asarray(result.output, np.float64)[0, 0] - out, axis=-1)
        self.assertTrue(bool(result.certificate.certified.all()))
        np.testing.assert_array_less(error, 0.3 * scale)
        np.testing.assert_array_less(np.asarray(result.certificate.value_scale_lower)[0], scale)
