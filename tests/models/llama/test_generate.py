import dataclasses
import functools
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

import certjax
from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import decode, generate, modeling, prefill, unpadded
from certjax.models.llama.generate import _begin, _options, _run
from certjax.models.llama.prefill import check_room

RNG = np.random.default_rng(2)
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (3, 20, 9)]
KEY = jax.random.key(7)


@functools.cache
def dense_model():
    return dummy_model(attention="dense")


@functools.cache
def forward():
    return jax.jit(lambda model, ids: model(ids))


def greedy(model, prompt, count):
    """Greedy continuation by the plain forward, one full pass a token; what stands behind a token cannot change it."""
    ids = np.zeros((1, 32), np.int32)
    ids[0, : len(prompt)] = prompt
    for at in range(len(prompt), len(prompt) + count):
        ids[0, at] = forward()(model, ids)[0, at - 1].argmax()
    return ids[0, len(prompt) : len(prompt) + count].tolist()


class DecodeStepTest(parameterized.TestCase):
    # Pitfall 17: of 20 tokens a window of 6 forgets most; positions count all of them.
    @parameterized.parameters(((None, None),), ((6, None),))
    def test_step_by_step_equals_the_plain_forward(self, windows):
        model = dummy_model(dummy_config(windows=windows), attention="dense")
        ids = RNG.integers(0, 64, (2, 20)).astype(np.int32)
        expected = forward()(model, ids)
        caches, hints = model.init_caches(2, 64), model.init_hints(2)
        step = jax.jit(modeling.Llama.decode_step, donate_argnums=(2,))
        for t in range(20):
            logits, caches, hints, metrics = step(model, ids[:, t], caches, hints, rng=KEY, config=certjax.Config())
            np.testing.assert_allclose(logits, expected[:, t], atol=1e-4)
        chex.assert_shape(metrics["exact"], (2, 2, 4))
        assert metrics["exact"].all()

    def test_rng_differs_by_layer_and_step(self):
        seen = []

        def spy(query, cache, *, rng, hint, config):
            jax.debug.callback(lambda data: seen.append(tuple(data.ravel().tolist())), jax.random.key_data(rng))
            return certjax.dense_decode_attention(query, cache, config=config)

        generate(dummy_model(attention=spy), PROMPTS[:1], max_new_tokens=4, rng=KEY)
        jax.effects_barrier()
        assert len(set(seen)) == 2 * 3


class GenerateTest(parameterized.TestCase):
    def test_greedy_ragged_batch_equals_each_row_alone(self):
        """Row 38 of pitfalls.md."""
        model = dense_model()
        result = generate(model, PROMPTS, max_new_tokens=6, rng=KEY)
        chex.assert_shape(result.tokens, (3, 6))
        for b, prompt in enumerate(PROMPTS):
            assert result.tokens[b].tolist() == greedy(model, prompt, 6)
        np.testing.assert_array_equal(result.lengths, [6, 6, 6])

    # Pitfall 30.
    def test_padded_prompts_are_the_prompts(self):
        """Wherever the padding stands, and whatever token it is."""
        left = unpadded([[9, 9, 9, 5], [1, 2, 3, 4]], [[0, 0, 0, 1], [1, 1, 1, 1]])
        right = unpadded(np.array([[5, 9, 9, 9], [1, 2, 3, 4]]), np.array([[1, 0, 0, 0], [1, 1, 1, 1]], bool))
        assert left == right == [[5], [1, 2, 3, 4]]
        for ids, mask, message in (
            ([[1, 2, 3]], [[1, 0, 1]], r"mask\[0\] has a gap"),
            ([[1, 2]], [[0, 0]], r"mask\[0\] is empty"),
            ([[1, 2]], [[1]], r"ids and mask must be \[B, T\] alike: got \(1, 2\) and \(1, 1\)"),
            ([[1, 2]], [[1, 2]], "mask must hold 0 and 1 only"),
        ):
            with pytest.raises(ValueError, match=message):
                unpadded(ids, mask)

    def test_rows_end_at_any_end_token(self):
        model = dense_model()
        free = np.asarray(generate(model, PROMPTS, max_new_tokens=6, rng=KEY).tokens)
        ends = {int(free[0, 2]), int(free[1, 4])}
        stop = [next((i + 1 for i, t in enumerate(row) if int(t) in ends), 6) for row in free]
        assert min(stop) < 6
        result = generate(model, PROMPTS, max_new_tokens=6, rng=KEY, end_ids=ends)
        assert result.lengths.tolist() == stop
        for b, n in enumerate(stop):
            assert result.tokens[b].tolist() == free[b, :n].tolist() + [-1] * (6 - n)
            steps = np.asarray(result.statistics["exact"])[:, :, b]
            assert steps[: n - 1].all()
            assert not steps[n - 1 :].any()

    def test_a_single_token_needs_no_step(self):
        result = generate(dense_model(), PROMPTS, max_new_tokens=1, rng=KEY)
        assert result.tokens[:, 0].tolist() == [greedy(dense_model(), p, 1)[0] for p in PROMPTS]
        chex.assert_shape(result.statistics["keys_read"], (0, 2, 3, 4))

    def test_stream_gives_the_same_tokens(self):
        parts = []
        free = np.asarray(generate(dense_model(), PROMPTS, max_new_tokens=6, rng=KEY).tokens)
        run = functools.partial(generate, dense_model(), PROMPTS, max_new_tokens=6, rng=KEY)
        whole = run(end_ids=free[:2, 3].tolist())
        streamed = run(end_ids=free[:2, 3].tolist(), stream=lambda *part: parts.append(part))
        chex.assert_trees_all_equal(whole, streamed)
        assert [index for index, _ in parts] == list(range(int(whole.lengths.max())))
        np.testing.assert_array_equal(np.stack([tokens for _, tokens in parts], 1), whole.tokens[:, : len(parts)])

    def test_exception_in_the_stream_reaches_the_caller(self):
        def stop(index, tokens):
            if index == 2:
                raise BrokenPipeError("reader has gone")

        with pytest.raises(BrokenPipeError, match="reader has gone"):
            generate(dense_model(), PROMPTS, max_new_tokens=6, rng=KEY, stream=stop)

    def test_sampling_follows_the_key(self):
        run = functools.partial(generate, dense_model(), PROMPTS, max_new_tokens=6, temperature=1.5, top_p=0.95)
        first, again, other = (run(rng=jax.random.key(k)).tokens.tolist() for k in (1, 1, 2))
        assert first == again
        assert first != other
        assert first[0] != greedy(dense_model(), PROMPTS[0], 6)
        tiny = run(rng=jax.random.key(1), top_p=1e-6).tokens[0].tolist()
        assert tiny == greedy(dense_model(), PROMPTS[0], 6)

    def test_decode_goes_on_from_a_prefill(self):
        model = dense_model()
        logits, caches = prefill(model, PROMPTS, model.init_caches(3, 64))
        first, caches = decode(model, logits, caches, max_new_tokens=3, rng=KEY)
        np.testing.assert_array_equal(caches[1].length, [len(p) + 2 for p in PROMPTS])
        last = [[int(t)] for t in first.tokens[:, -1]]
        logits, caches = prefill(model, last, caches)
        second, _ = decode(model, logits, caches, max_new_tokens=3, rng=KEY)
        whole = generate(model, PROMPTS, max_new_tokens=6, rng=KEY)
        np.testing.assert_array_equal(np.concatenate([first.tokens, second.tokens], 1), whole.tokens)


class CertifiedTest(parameterized.TestCase):
    @pytest.mark.slow
    def test_statistics_and_tokens(self):
        """An ε so small that every head falls back to exact gives the dense tokens."""
        config = dummy_config(num_layers=1)
        certified = certjax.Config(epsilon=1e-6, window=8)
        model = dummy_model(config, attention="certified", certified_config=certified)
        result = generate(model, PROMPTS[1:2], max_new_tokens=3, rng=KEY)
        assert result.tokens[0].tolist() == greedy(model, PROMPTS[1], 3)
        assert set(result.statistics) == set(modeling.CERTIFICATE_METRICS)
        for name, x in result.statistics.items():
            chex.assert_shape(x, (2, 1, 1, 4), custom_message=name)
        assert result.statistics["certified"].all()

    def test_custom_attention_sees_config_and_adds_statistics(self):
        def audited(query, cache, *, rng, hint, config):
            result = certjax.dense_decode_attention(query, cache, config=config)
            shape = result.certificate.exact.shape
            hint = dataclasses.replace(hint, level=hint.level + 1)
            result = dataclasses.replace(result, hint=hint)
            return result, {
                "epsilon": jnp.broadcast_to(jnp.asarray(config.epsilon, jnp.float32), shape),
                "span": jnp.full(shape, config.attention_span or 0, jnp.int32),
                "level": hint.level,
            }

        model = dummy_model(dummy_config(windows=(5, None)), attention=audited)
        result = generate(model, PROMPTS[:2], max_new_tokens=4, rng=KEY, certified_config=certjax.Config(epsilon=0.25))
        extra = result.statistics
        np.testing.assert_array_equal(extra["epsilon"], np.full((3, 2, 2, 4), 0.25))
        np.testing.assert_array_equal(extra["span"][0, :, 0, 0], [5, 0])
        np.testing.assert_array_equal(extra["level"][:, 1, 1, 2], [0, 1, 2])  # the hint travels from step to step

    @parameterized.parameters(("call", 0.3), ("generation", 0.3 / (2 * 2 * 4 * 3)))  # layers, rows, heads, steps
    def test_delta_is_for_a_call_or_for_everything(self, scope, expected):
        def report(query, cache, *, rng, hint, config):
            result = certjax.dense_decode_attention(query, cache, config=config)
            shape = result.certificate.exact.shape
            return result, {"delta": jnp.broadcast_to(jnp.asarray(config.delta, jnp.float32), shape)}

        model = dummy_model(dummy_config(), attention=report)
        options = {"certified_config": certjax.Config(delta=0.3), "delta_scope": scope}
        result = generate(model, [[1, 2, 3], [4]], max_new_tokens=4, rng=KEY, **options)
        np.testing.assert_allclose(result.statistics["delta"], np.full((3, 2, 2, 4), expected), rtol=1e-6)

    def test_compiles_once(self):
        """Row 9 of pitfalls.md."""
        chex.clear_trace_counter()

        @functools.partial(chex.assert_max_traces, n=1 + 1)  # the layer in the loop, and once to size the statistics
        def counted(query, cache, *, rng, hint, config):
            return certjax.dense_decode_attention(query, cache, config=config)

        model = dummy_model(dummy_config(num_layers=1), attention=counted)
        # Other prompts, lengths, keys, ε, temperature, and streaming: all the same program.
        for i, (temperature, stream) in enumerate([(1.0, None), (0.7, None), (1.0, lambda *_: None)]):
            generate(
                model, [[1 + i, 2], [3] * (2 + i)], max_new_tokens=5, rng=jax.random.key(i), temperature=temperature,
                stream=stream, certified_config=certjax.Config(epsilon=0.1 * (i + 1), delta=jnp.float32(1e-3)),
            )  # fmt: skip

    def test_loop_copies_neither_weights_nor_caches(self):
        """Rows 6 and 7 of pitfalls.md."""

        def newest(query, cache, *, rng, hint, config):  # reads one value, so that all that is left is the loop's own
            del config
            at = (0, 0, cache.length[0] - 1, 0)
            value = jax.lax.dynamic_slice(cache.value, at, (1, 2, 1, 16)).reshape(1, 1, 2, 16)
            every = jnp.ones((1, 4), bool)
            none = every.astype(jnp.float32)
            count = every.astype(jnp.int32)
            certificate = certjax.Certificate(every, every, none, count, none, count, count, none, none, none)
            return certjax.AttentionResult(jnp.concatenate([value, value], 2) + query, certificate, hint)

        config = dummy_config(hidden_size=64, tied_embeddings=True, vocab_size=1024)
        model = dummy_model(config, attention=newest)
        options = _options(model, 1, 4, KEY, (), 0.0, None, 1.0, None, "call")
        weights, structure = jax.tree.flatten(model)
        caches, logits = model.init_caches(1, 8192), jnp.zeros((1, 1024))
        begin = functools.partial(_begin, structure, weights, max_new_tokens=4)
        state, _ = jax.eval_shape(begin, logits, caches, options)
        memory = _run.lower(structure, weights, state, options, np.int32(4)).compile().memory_analysis()
        cache_bytes = 8192 * 2 * 16 * 4
        assert memory.alias_size_in_bytes > 4 * cache_bytes  # keys and values of both layers
        assert memory.temp_size_in_bytes < 1024 * 64 * 4  # less than the embedding table


class ErrorsTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"prompts": [[1], []]}, r"prompts\[1\] is empty"),
        ({"prompts": [[64]]}, "token id 64, outside the vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a positive integer, got 0"),
        ({"max_new_tokens": 4095}, "prompt of 2 tokens and 4095 new ones exceed .* longest context of 4096"),
        ({"end_ids": [3, 99]}, "end_ids .* must lie in the vocabulary 0 … 63"),
        ({"temperature": -1.0}, "temperature must be 0 .greedy. or positive, got -1.0"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": 0}, "top_k must be a positive integer or None, got 0"),
        ({"top_k": 2.0}, "top_k must be a positive integer or None, got 2.0"),
        ({"delta_scope": "step"}, 'delta_scope must be "call" or "generation", got .step.'),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
    )
    def test_refuses(self, options, message):
        with pytest.raises(ValueError, match=message):
            generate(dense_model(), **{"prompts": [[1, 2]], "max_new_tokens": 2, "rng": KEY} | options)

    def test_decode_refuses_more_than_the_caches_hold(self):
        model = dense_model()
        logits, caches = prefill(model, PROMPTS, model.init_caches(3, 64))
        check_room(model, caches, np.full(3, 64 - len(PROMPTS[1])), what="the new ones")
        with pytest.raises(ValueError, match=r"row 1 would hold 65 tokens with the new ones, .* capacity is 64"):
            decode(model, logits, caches, max_new_tokens=64 - len(PROMPTS[1]) + 2, rng=KEY)


@pytest.mark.slow
def test_streams_on_one_core_and_exits_cleanly():
    script = """
import os
os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
import jax
from certjax.models.dummy import dummy_model
from certjax.models.llama import generate
generate(dummy_model(attention="dense"), [[1, 2, 3]], max_new_tokens=5, rng=jax.random.key(0),
         stream=lambda i, t: print(i, int(jax.numpy.sum(t)), flush=True))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["0", "1", "2", "3", "4"]
    assert "Error" not in done.stderr
