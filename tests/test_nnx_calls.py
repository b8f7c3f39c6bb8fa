"""The Flax adapter under transforms, in calls that are no decode steps, and where it refuses."""

import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import certjax
import certjax.nnx
from certjax.nnx import CertifiedAttention
from tests.shared.flax_layers import (
    SHAPE,
    B,
    F,
    H,
    K,
    N,
    S,
    certificate,
    draw,
    make_layer,
    make_pair,
)


class TransformsTest(chex.TestCase):
    """Three layers, made by `nnx.vmap`, one after the other or side by side."""

    def make(self, certified):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def create(rngs):
            layer = make_layer(certified, rngs=rngs)
            noise = jax.random.normal(rngs.params(), layer.key.kernel.shape)
            layer.key.kernel[...] = F**-0.5 / 4 * noise  # layers that differ; scores near 1, so errors do not grow
            certjax.nnx.init_cache(layer, SHAPE) if certified else layer.init_cache(SHAPE)
            return layer

        return create(nnx.Rngs(1, certjax=2))

    def check(self, run):
        layers, stock = self.make(True), self.make(False)
        keys = jax.random.key_data(layers.attention_fn.rngs.key[...])
        self.assertLen({tuple(x) for x in keys.tolist()}, 3)
        for x in draw(4):
            chex.assert_trees_all_close(run(layers, x), run(stock, x), atol=1e-5)
        self.assertEqual(layers.attention_fn.cache.get_value().length.tolist(), [[4, 4]] * 3)
        self.assertEqual(layers.attention_fn.rngs.count[...].tolist(), [4, 4, 4])
        self.assertTrue(certificate(layers).certified.all())

    @pytest.mark.slow
    def test_scan(self):
        @nnx.jit
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return x + layer(x)

        self.check(run)

    @pytest.mark.slow
    def test_vmap(self):
        self.check(nnx.jit(nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))))

    @pytest.mark.slow
    def test_tree_mode(self):
        layer, stock = make_pair()
        run = nnx.jit(lambda layer, x: layer(x), graph=False)
        for x in draw(3):
            chex.assert_trees_all_close(run(layer, x), run(stock, x), atol=1e-5)
        self.assertEqual(layer.attention_fn.cache.get_value().length.tolist(), [3, 3])


class OtherCallsTest(chex.TestCase):
    def loss(self, layer):
        x = draw(1, shape=(B, 9, F))[0]
        return (layer(x, mask=nnx.make_causal_mask(x[..., 0]), decode=False) ** 2).sum()

    def test_a_full_forward_is_the_stock_one(self):
        layer, stock = make_pair()
        run = nnx.jit(self.loss)
        chex.assert_trees_all_equal(run(layer), run(stock))
        self.assertEqual(layer.attention_fn.cache.get_value().length.tolist(), [0, 0])

    @pytest.mark.slow
    def test_its_gradient_too(self):
        run = nnx.jit(nnx.grad(self.loss))
        chex.assert_trees_all_equal(*(jax.tree.leaves(run(layer)) for layer in make_pair()))

    @pytest.mark.slow
    def test_dropout_in_training(self):
        run = nnx.jit(lambda layer, x, rngs: layer(x, decode=False, deterministic=False, rngs=rngs))
        layers = (make_layer(certified, dropout_rate=0.5) for certified in (True, False))
        chex.assert_trees_all_equal(*(run(layer, draw(7)[:, 0], nnx.Rngs(3)) for layer in layers))

    def test_one_token_without_a_mask(self):
        layer, stock = make_pair()
        x = draw(1)[0]
        chex.assert_trees_all_equal(layer(x, decode=False), stock(x, decode=False))


class ErrorsTest(chex.TestCase):
    def test_no_cache(self):
        layer = make_layer()
        layer.init_cache(SHAPE)
        with self.assertRaisesRegex(ValueError, "certjax.nnx.init_cache"):
            layer(draw(1)[0])

    def test_a_cache_of_another_size(self):
        layer, _ = make_pair()
        layer.init_cache((B + 1, S, F))
        with self.assertRaisesRegex(ValueError, r"\(2, 2\), capacity 192, head dim 16: got \(3, 192, 2, 16\)"):
            layer(jnp.ones((B + 1, 1, F)))

    def test_dropout(self):
        layer = make_layer(dropout_rate=0.5)
        certjax.nnx.init_cache(layer, SHAPE)
        with self.assertRaisesRegex(ValueError, "no dropout, got rate 0.5"):
            layer(draw(1)[0], deterministic=False, rngs=nnx.Rngs(0))
        layer.init_cache(SHAPE)
        layer(draw(1)[0], deterministic=True)

    def test_bias_and_sown_weights(self):
        layer, _ = make_pair()
        with self.assertRaisesRegex(ValueError, "sow_weights=False"):
            layer(draw(1)[0], sow_weights=True)
        buffer, mask = jnp.ones((B, S, K, H)), jnp.ones((B, 1, 1, S))
        with self.assertRaisesRegex(ValueError, "no bias"):
            layer.attention_fn(jnp.ones((B, 1, N, H)), buffer, buffer, bias=mask, mask=mask)
        with self.assertRaisesRegex(ValueError, r"query must be \(2, 1, 4, 16\): got \(2, 1, 2, 16\)"):
            layer.attention_fn(jnp.ones((B, 1, 2, H)), buffer, buffer, mask=mask)

    def test_layers_that_share(self):
        with self.assertRaisesRegex(ValueError, "none of the 1"):
            certjax.nnx.init_cache(make_layer(certified=False), SHAPE)
        with self.assertRaisesRegex(ValueError, "same random key"):
            certjax.nnx.init_cache(nnx.List([make_layer(), make_layer()]), SHAPE)
        layers = nnx.List([make_layer(), make_layer()])
        layers[1].attention_fn = layers[0].attention_fn
        with self.assertRaisesRegex(ValueError, "share one CertifiedAttention"):
            certjax.nnx.init_cache(layers, SHAPE)

    def test_options(self):
        with self.assertRaisesRegex(ValueError, "implementation must be"):
            CertifiedAttention(implementation="fast", rngs=nnx.Rngs(0))


def test_importing_certjax_does_not_import_flax():
    code = "import sys, certjax; sys.exit('flax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
