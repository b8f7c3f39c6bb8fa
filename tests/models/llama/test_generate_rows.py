"""Rows of a batch keep to themselves; streams run ahead; long decodes compile once. Numbers are rows of pitfalls.md."""

import functools
import importlib
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

import certjax
from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import decode, generate, prefill, unpadded

module = importlib.import_module("certjax.models.llama.generate")  # the package's `generate` is the function
RNG = np.random.default_rng(5)
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (150, 37, 190, 137)]
KEY = jax.random.key(11)
CAPACITY = 256


@functools.cache
def model(attention):
    # Nothing goes to dense for its cost, so that perturbations decide what is read.
    promise = certjax.Config(epsilon=0.5, delta=0.1, window=8, always_sample=True)
    return dummy_model(dummy_config(num_layers=1), attention=attention, certified_config=promise)


def continued(attention, prompts, rng, **options):
    caches = model(attention).init_caches(len(prompts), CAPACITY)
    logits, caches = prefill(model(attention), prompts, caches, chunk=64)
    return decode(model(attention), logits, caches, max_new_tokens=12, rng=rng, **options)[0]


SAMPLED = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "end_ids": [7]}


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        ("certified", SAMPLED),
        pytest.param("dense", SAMPLED, marks=pytest.mark.slow),
        pytest.param("certified", {}, marks=pytest.mark.slow),
        pytest.param("dense", {}, marks=pytest.mark.slow),
        pytest.param("certified", {"temperature": 0.7}, marks=pytest.mark.slow),
    ],
)
def test_a_batch_is_its_rows_alone(attention, options):
    """Rows 30 and 38: ragged lengths, padded on the left, each row with a key of its own."""
    keys = jax.random.split(KEY, 4)
    width = max(len(prompt) for prompt in PROMPTS) + 7
    padded = np.array([[0] * (width - len(prompt)) + prompt for prompt in PROMPTS])
    mask = np.arange(width) >= width - np.array([[len(prompt)] for prompt in PROMPTS])
    batch = continued(attention, unpadded(padded, mask), keys, **options)
    for b, prompt in enumerate(PROMPTS):
        alone = continued(attention, [prompt], keys[b : b + 1], **options)
        assert batch.tokens[b].tolist() == alone.tokens[0].tolist()
        for name in ("exact", "keys_read"):
            np.testing.assert_array_equal(batch.statistics[name][:, :, b], alone.statistics[name][:, :, 0], name)
    sampled = np.asarray(batch.statistics["certified"] & ~batch.statistics["exact"])
    assert sampled.any() == (attention == "certified")
    assert len({tuple(row) for row in np.asarray(batch.tokens).tolist()}) == 4


def test_one_key_is_a_key_for_each_row():
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, np.arange(4))
    prompts = [PROMPTS[0]] * 4
    first, second = (continued("certified", prompts, rng, **SAMPLED).tokens.tolist() for rng in (KEY, keys))
    assert first == second
    assert first[0] != first[1]  # the same prompt, other draws
    for rng in (jax.random.split(KEY, 3), np.zeros(2, np.uint32)):
        with pytest.raises(ValueError, match=r"rng must be a key made by jax.random.key, or one key a row, \[4\]"):
            generate(model("dense"), prompts, max_new_tokens=2, rng=rng)


def test_200_tokens_compile_once():
    """Row 9, with and without a stream, whatever row ends when."""
    logits, caches = prefill(model("dense"), PROMPTS[1:2], model("dense").init_caches(1, CAPACITY), chunk=64)
    before, held, texts = module._run._cache_size(), jax.tree.map(np.asarray, caches), []
    for end_ids in ([1], [2]):
        for stream in (None, lambda *_: None):
            caches = jax.tree.map(jax.numpy.array, held)
            result, _ = decode(
                model("dense"), logits, caches, max_new_tokens=200, rng=KEY, end_ids=end_ids, stream=stream
            )
            texts.append(result.tokens[0].tolist())
    assert module._run._cache_size() == before + 1
    assert texts[0] == texts[1] != texts[2]
    assert texts[2] == texts[3]


def test_the_next_step_is_under_way_while_tokens_are_told():
    events = []
    run = module._run

    def spy(structure, weights, state, options, limit):
        events.append(("run", int(limit)))
        # Row 10: no call flattens a module, which takes milliseconds; `structure` is a tree definition, made once.
        assert not any(isinstance(x, nnx.Module) for x in (structure, weights, state, options))
        return run(structure, weights, state, options, limit)

    free = continued("certified", [PROMPTS[1]], KEY, **SAMPLED).tokens[0].tolist()
    end = free[3]
    told = free.index(end) + 1
    with mock.patch.object(module, "_run", spy):
        stream = lambda i, _: events.append(("told", i))
        continued("certified", [PROMPTS[1]], KEY, **SAMPLED | {"end_ids": [end]}, stream=stream)
    # Step t + 1 is asked for before token t is told; after the end one step has been asked for, which does nothing.
    expected = [event for i in range(told) for event in (("run", i + 2), ("told", i))]
    assert events == expected
