import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import prefill, unpadded
from certjax.models.llama.prefill import _prefill_chunk, chunk_attention

RNG = np.random.default_rng(1)
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (37, 5, 64)]


@functools.cache
def forward():
    return jax.jit(lambda model, ids: model(ids))


@functools.cache
def one_layer():
    return dummy_model(dummy_config(num_layers=1), attention="dense")


def plain(model, prompt):
    """Logits [len(prompt), V] of the plain forward; padding stands behind and changes nothing."""
    ids = np.zeros((1, 64), np.int32)
    ids[0, : len(prompt)] = prompt
    return np.asarray(forward()(model, ids))[0, : len(prompt)]


class PrefillTest(parameterized.TestCase):
    @parameterized.parameters((1, (None,)), (16, (11, None)), (512, (11,)))
    def test_equals_the_plain_forward(self, chunk, windows):
        model = dummy_model(dummy_config(num_layers=len(windows), windows=windows), attention="dense")
        prompts = PROMPTS if chunk > 1 else [prompt[:9] for prompt in PROMPTS]
        logits, caches = prefill(model, prompts, model.init_caches(3, 64), chunk=chunk)
        for b, prompt in enumerate(prompts):
            np.testing.assert_allclose(logits[b], plain(model, prompt)[-1], atol=1e-4)
        for cache in caches:
            np.testing.assert_array_equal(cache.length, [len(prompt) for prompt in prompts])

    # Pitfall 30.
    def test_left_padding_and_other_rows_change_nothing(self):
        model = one_layer()
        prompt, others = PROMPTS[0][:9], [PROMPTS[2][:16], PROMPTS[1]]
        padded = np.full((3, 16), 63, np.int32)
        mask = np.zeros((3, 16), bool)
        for i, row in enumerate((others[0], prompt, others[1])):
            padded[i, 16 - len(row) :], mask[i, 16 - len(row) :] = row, True
        assert mask[1].tolist() == [False] * 7 + [True] * 9
        together, _ = prefill(model, unpadded(padded, mask), model.init_caches(3, 64), chunk=16)
        alone, _ = prefill(model, [prompt], model.init_caches(1, 64), chunk=16)
        np.testing.assert_allclose(together[1], alone[0], atol=1e-5)

    def test_all_logits_and_progress(self):
        model = one_layer()
        seen, done = {}, []
        prefill(
            model, PROMPTS, model.init_caches(3, 64), chunk=16, progress=lambda *n: done.append(n),
            on_logits=seen.__setitem__,
        )  # fmt: skip
        assert list(seen) == [0, 16, 32, 48]
        assert done == [(16, 64), (32, 64), (48, 64), (64, 64)]
        logits = np.concatenate(list(seen.values()), axis=1)
        for b, prompt in enumerate(PROMPTS):
            np.testing.assert_allclose(logits[b, : len(prompt)], plain(model, prompt), atol=1e-4)

    @parameterized.parameters(jnp.bfloat16, jnp.float16)
    def test_16_bit_caches(self, dtype):
        model = one_layer()
        logits, caches = prefill(model, PROMPTS, model.init_caches(3, 64, dtype), chunk=16)
        assert caches[0].key.dtype == (jnp.uint16 if dtype == jnp.bfloat16 else dtype)
        expected = np.stack([plain(model, prompt)[-1] for prompt in PROMPTS])
        error = np.abs(logits - expected).max()
        assert error < 0.05 * np.abs(expected).max()
        assert error > 1e-05  # the caches do round

    def test_one_compilation_whatever_the_length(self):
        before = _prefill_chunk._cache_size()
        # Committed weights, as a checkpoint gives them: what the calls pass on must not change its placement.
        model = jax.device_put(one_layer(), jax.devices()[0])
        for n in (17, 100, 200):
            prefill(model, [RNG.integers(0, 64, n).tolist()], model.init_caches(1, 256), chunk=16)
        assert _prefill_chunk._cache_size() == before + 1

    def test_no_buffer_grows_with_the_capacity(self):
        """Scores of a chunk over the whole capacity, or a widened copy of a cache, would be of that size."""
        model = one_layer()
        capacity = 4096

        def temporary(capacity, dtype):
            caches = model.init_caches(1, capacity, dtype)
            args = (model, caches, jnp.zeros((1, 16), jnp.int32), jnp.ones((1,), jnp.int32), jnp.zeros((1, 32)))
            compiled = _prefill_chunk.lower(*args, all_logits=False).compile()
            return compiled.memory_analysis().temp_size_in_bytes, compiled.as_text()

        small, _ = temporary(capacity, jnp.bfloat16)
        large, text = temporary(4 * capacity, jnp.bfloat16)
        growth_of_the_keys = 3 * capacity * 2 * 16 * 2
        assert large - small < growth_of_the_keys // 4
        assert re.search(rf"f32\[1,2,{4 * capacity},16\]\S* convert", text) is None

    def test_embedding_table_is_not_widened(self):
        config = dummy_config(vocab_size=5000, tied_embeddings=False)
        model = dummy_model(config, dtype=jnp.bfloat16, attention="dense")
        compiled = jax.jit(type(model).embed).lower(model, jnp.zeros((1, 4), jnp.int32)).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 5000 * 32

    @parameterized.parameters(
        ([], "prompts is empty"),
        ([[1], []], r"prompts\[1\] is empty"),
        ([[1, 64]], r"prompts\[0\] has token id 64, outside the vocabulary 0 … 63"),
        ([[-1]], "token id -1"),
        ([[0.5]], r"prompts\[0\] must be a sequence of integers, got float64"),
        ([[[1]]], "must be a sequence of integers"),
        ([[1] * 65], "row 0 would hold 65 tokens with the prompt, but the cache's capacity is 64"),
        ([[1], [1]], "the caches have 1 rows, expected 2"),
    )
    def test_refuses(self, prompts, message):
        model = one_layer()
        with pytest.raises(ValueError, match=message):
            prefill(model, prompts, model.init_caches(1, 64))

    def test_refuses_more_than_the_model_can_hold(self):
        model = dummy_model(dummy_config(max_positions=8), attention="dense")
        with pytest.raises(ValueError, match="longest context is 8"):
            prefill(model, [[1] * 9], model.init_caches(1, 64))
        with pytest.raises(ValueError, match="chunk must be a positive integer, got 0"):
            prefill(model, [[1]], model.init_caches(1, 64), chunk=0)


class ChunkAttentionTest(chex.TestCase):
    @parameterized.product(case=((None, 3), (None, 300), (1, 3), (4, 3), (600, 3)), capacity=(640, 1088))
    def test_against_float64(self, case, capacity):
        """Several key blocks, the last one overlapping its predecessor; rows of different lengths, one of them idle.

        With 300 tokens in every row that is not, the first block needs no mask.
        """
        window, oldest = case
        rng = np.random.default_rng(0)
        B, T, K, G, H = 3, 8, 2, 2, 16
        model = one_layer()
        start, count = np.array([capacity - 8, oldest, 70], np.int32), np.array([8, 5, 0], np.int32)
        key, value = (rng.standard_normal((B, K, capacity, H)).astype(np.float32) for _ in range(2))
        query = 3 * rng.standard_normal((B, T, K * G, H)).astype(np.float32)
        cache = dataclasses.replace(model.init_caches(B, capacity)[0], key=jnp.asarray(key), value=jnp.asarray(value))
        attend = jax.jit(chunk_attention, static_argnames="window")
        out = np.asarray(attend(query, cache, start, count, window=window))
        assert np.isfinite(out).all()
        for b in range(B):
            for t in range(count[b]):
                at = start[b] + t
                seen = slice(0 if window is None else max(0, at - window + 1), at + 1)
                for n in range(K * G):
                    scores = key[b, n // G, seen].astype(np.float64) @ query[b, t, n] / np.sqrt(H)
                    weights = np.exp(scores - scores.max())
                    expected = weights @ value[b, n // G, seen] / weights.sum()
                    np.testing.assert_allclose(out[b, t, n], expected, atol=2e-5)
