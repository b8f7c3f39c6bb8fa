"""Decode steps of the stock Flax attention layer with certified attention, against the same layer without."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from flax import nnx

import certjax
import certjax.nnx
from tests.shared.flax_layers import (
    SHAPE,
    B,
    F,
    H,
    K,
    N,
    S,
    assert_within_bounds,
    certificate,
    draw,
    make_layer,
    make_pair,
    step,
)


class DecodeTest(chex.TestCase):
    def test_every_step_is_within_its_bound_of_the_stock_layer(self):
        layer, stock = make_pair()
        graph, state = nnx.split((layer, stock))

        def feed(state, x):
            layer, stock = nnx.merge(graph, state)
            outputs = layer(x), stock(x)
            return nnx.state((layer, stock)), (*outputs, certificate(layer))

        _, (output, dense, c) = jax.jit(functools.partial(jax.lax.scan, feed))(state, draw(S))
        self.assertEqual(c.certified.shape, (S, B, N))
        assert_within_bounds(output, dense, c)
        sampled = ~np.asarray(c.exact)
        self.assertGreater(sampled.sum(), 100)
        self.assertGreater(np.abs(np.asarray(output - dense)).max(), 1e-4)  # an estimate, not a dense result
        self.assertTrue((np.asarray(c.error_bound)[sampled] > 0).all())

    def test_twenty_steps_compile_once_and_in_place(self):
        chex.clear_trace_counter()
        layer, _ = make_pair()

        @nnx.jit(donate_argnums=0)
        @chex.assert_max_traces(n=1)
        def step(layer, x):
            return layer(x)

        def buffers():
            cache = layer.attention_fn.cache.get_value()
            arrays = (cache.key, cache.value, cache.codes, layer.cached_key[...])
            return [x.unsafe_buffer_pointer() for x in arrays]

        step(layer, draw(1)[0])
        before = buffers()
        for x in draw(19):
            step(layer, x)
        self.assertEqual(buffers(), before)
        self.assertEqual(layer.attention_fn.cache.get_value().length.tolist(), [20, 20])
        self.assertEqual(int(layer.attention_fn.rngs.count[...]), 20)

    @pytest.mark.slow
    def test_the_compiled_step_copies_no_cache(self):
        layer, _ = make_pair((B, 4096, F))
        graph, state = nnx.split(layer)

        def step(state, x):
            layer = nnx.merge(graph, state)
            return layer(x), nnx.state(layer)

        text = jax.jit(step, donate_argnums=0).lower(state, draw(1)[0]).compile().as_text()
        cache = layer.attention_fn.cache.get_value()
        shapes = {str(list(x.shape)).replace(" ", "") for x in (cache.key, cache.codes, layer.cached_key[...])}
        self.assertIn("[2,2,4096,16]", shapes)
        copies = [line for line in text.splitlines() if " copy(" in line or " convert(" in line]
        self.assertEqual([line for line in copies if any(shape in line.split("(")[0] for shape in shapes)], [])

    @pytest.mark.slow
    def test_the_split_is_paid_once(self):
        """A step over a split state needs no module, and leaves the weights alone."""
        layer, stock = make_pair()
        graph, weights, state = nnx.split(layer, nnx.Param, ...)

        @jax.jit
        def plain_step(weights, state, x):
            layer = nnx.merge(graph, weights, state)
            output = layer(x)
            return output, nnx.state(layer, nnx.Not(nnx.Param))

        for x in draw(3):
            output, state = plain_step(weights, state, x)
            chex.assert_trees_all_close(output, step(stock, x), atol=1e-5)
        self.assertEqual(plain_step._cache_size(), 1)
        nnx.update(layer, state)
        self.assertEqual(layer.attention_fn.cache.get_value().length.tolist(), [3, 3])
        self.assertTrue(certificate(layer).certified.all())

    @pytest.mark.slow
    def test_bfloat16(self):
        layer = make_layer(dtype=jnp.bfloat16)
        certjax.nnx.init_cache(layer, SHAPE, jnp.bfloat16)
        with jax.numpy_dtype_promotion("standard"):  # jax.nn.dot_product_attention needs it
            output = step(layer, draw(1)[0])
        self.assertEqual(output.dtype, jnp.bfloat16)
        self.assertEqual(layer.attention_fn.cache.get_value().dtype, "bfloat16")
        self.assertTrue(certificate(layer).certified.all())

    @pytest.mark.slow
    def test_other_batch_dimensions(self):
        layer, stock = make_pair((3, 2, S, F))
        (x,) = draw(1, shape=(3, 2, 1, F))
        chex.assert_trees_all_close(layer(x), stock(x), atol=1e-5)
        self.assertEqual(certificate(layer).certified.shape, (6, N))


class KeysTest(chex.TestCase):
    def test_no_key_is_used_twice(self):
        """Not along the steps; nor where a cache is taken back; nor where only the caches are carried on."""
        seen = []

        def spy(query, cache, *, rng, **options):
            jax.debug.callback(lambda x: seen.append(tuple(x.tolist())), jax.random.key_data(rng))
            return certjax.decode_attention(query, cache, rng=rng, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(certjax.nnx, "decode_attention", spy)
            patch.setattr(certjax.nnx, "_step", certjax.nnx._step.__wrapped__)
            rngs = nnx.Rngs(7)
            layers = nnx.List([make_layer(rngs=rngs) for _ in range(2)])
            certjax.nnx.init_cache(layers, SHAPE)
            graph, weights, caches, random = nnx.split(layers, nnx.Param, nnx.Cache, ...)

            @jax.jit
            def run(caches, random, x):
                layers = nnx.merge(graph, weights, caches, random)
                for layer in layers:
                    layer(x)
                _, _, caches, random = nnx.split(layers, nnx.Param, nnx.Cache, ...)
                return caches, random

            first, stuck = run(caches, random, draw(1)[0])
            _, moved = run(first, stuck, draw(1)[0])
            run(first, moved, draw(1)[0])  # the caches of before, the keys of after
            run(run(first, stuck, draw(1)[0])[0], stuck, draw(1)[0])  # the other way round
            jax.effects_barrier()
        # Ten calls of both layers but for one step that is the same in every respect.
        self.assertLen(seen, 10)
        self.assertLen(set(seen), 8)

    @pytest.mark.slow
    def test_the_same_state_gives_the_same_bits_and_another_key_does_not(self):
        layer, _ = make_pair()
        for x in draw(150):
            step(layer, x)

        def follow(layer):
            return jnp.stack([step(layer, x) for x in draw(20, seed=1)])

        one, same, other = (nnx.clone(layer) for _ in range(3))
        other.attention_fn.rngs.count[...] += 1
        output = follow(one)
        chex.assert_trees_all_equal(follow(same), output)
        self.assertGreater(float(jnp.abs(follow(other) - output).max()), 1e-5)


class TrackingTest(chex.TestCase):
    """The certjax cache follows the layer's own buffers, whatever was done to them."""

    def check(self, layer, stock, x):
        assert_within_bounds(step(layer, x), step(stock, x), certificate(layer))

    def follow(self, layer, stock, steps=20, seed=0):
        for x in draw(steps, seed=seed):
            self.check(layer, stock, x)

    def lengths(self, layer):
        return layer.attention_fn.cache.get_value().length.tolist()

    def test_buffers_filled_by_other_means(self):
        layer, stock = make_pair()
        for x in (layer, stock):
            x.cached_key[...], x.cached_value[...] = draw(2, shape=(B, S, K, H))
            x.cache_index[...] += 100
        self.follow(layer, stock, 2)
        self.assertEqual(self.lengths(layer), [102, 102])

    def test_a_reset_of_the_layer_alone(self):
        layer, stock = make_pair()
        for seed in range(2):
            self.follow(layer, stock, seed=seed)
            layer.init_cache(SHAPE)
            stock.init_cache(SHAPE)
        self.follow(layer, stock, 1, seed=2)
        self.assertEqual(self.lengths(layer), [1, 1])

    def test_rows_that_change_places(self):
        layer, stock = make_pair()
        self.follow(layer, stock)
        for x in (layer, stock):
            for buffer in (x.cached_key, x.cached_value):
                buffer[...] = buffer[...][::-1]
        self.follow(layer, stock, 2, seed=1)

    def test_steps_taken_back(self):
        layer, stock = make_pair()
        self.follow(layer, stock)
        for x in (layer, stock):
            x.cache_index[...] -= 7
        self.follow(layer, stock, 2, seed=1)
        self.assertEqual(self.lengths(layer), [15, 15])

    def test_full_buffers_written_over(self):
        """What the stock layer does beyond its capacity is followed as well."""
        layer, stock = make_pair()
        for x in (layer, stock):
            x.cache_index[...] += S - 1
        self.follow(layer, stock, 3)

    def test_not_a_number_spoils_its_row_until_the_next_reset(self):
        for before in (0, 1, 5):
            layer, _ = make_pair()
            same = draw(8)
            for x in same[:before]:
                step(layer, x)
            poisoned = same[before].copy()
            poisoned[0] = np.nan
            step(layer, poisoned)
            output = step(layer, same[before + 1])
            self.assertTrue(jnp.isnan(output[0]).all())
            chex.assert_tree_all_finite(output[1])
            self.assertEqual(certificate(layer).certified.all(1).tolist(), [False, True])
            layer.init_cache(SHAPE)
            for x in same:
                step(layer, x)
            self.assertTrue(certificate(layer).certified.all())


class MaskTest(chex.TestCase):
    def run_mask(self, mask):
        """(output, stock output, certificate) of a step after 30 under a mask that broadcasts to [B, N, 1, S]."""
        layer, stock = make_pair()
        for x in draw(30):
            step(layer, x), step(stock, x)
        x = draw(1, seed=1)[0]
        outputs, c = (step(layer, x, mask), step(stock, x, mask)), certificate(layer)
        assert_within_bounds(step(layer, x), step(stock, x), certificate(layer))  # the cache is in order afterwards
        return *outputs, c

    def test_rows_that_end_where_they_like_are_certified(self):
        output, dense, c = self.run_mask(jnp.arange(S)[None, None, None] < jnp.array([31, 12])[:, None, None, None])
        assert_within_bounds(output, dense, c)

    @parameterized.named_parameters(
        ("padded_on_the_left", lambda i, n, b: (i >= 5) | (b == 1)),
        ("a_hole", lambda i, n, b: (i != 9) | (b == 1)),
        ("another_for_a_head", lambda i, n, b: (i < 20) | (n != 2) | (b == 1)),
        ("empty", lambda i, n, b: (i < 0) | (b == 1)),
    )
    def test_a_mask_that_is_not_that_of_decoding_is_obeyed_and_not_certified(self, mask):
        b, n, _, i = jnp.meshgrid(jnp.arange(B), jnp.arange(N), jnp.arange(1), jnp.arange(S), indexing="ij")
        output, dense, c = self.run_mask(mask(i, n, b))
        chex.assert_trees_all_close(output[0], dense[0], atol=1e-5)
        self.assertFalse((c.certified | c.exact)[0].any())
        self.assertTrue(jnp.isposinf(c.error_bound[0]).all())
        assert_within_bounds(output[1:], dense[1:], jax.tree.map(lambda x: x[1:], c))
