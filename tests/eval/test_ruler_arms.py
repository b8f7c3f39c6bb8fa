"""Retrieval strategies as RULER's attention: exact where nothing is left out, wrong where much is."""

import dataclasses

import jax
import pytest

import certjax
from certjax import retrieval
from certjax.eval import ruler_arms
from certjax.eval.tasks import ruler
from tests.eval.tasks.ruler.test_runner import SAMPLE


@pytest.fixture(scope="module")
def parts(tokenizer_and_model):
    tokenizer, model = tokenizer_and_model
    return model, tokenizer, ruler.read(model, tokenizer, SAMPLE, cache_dtype="float32")


def answer(parts, strategy, setup, sample=SAMPLE):
    model, tokenizer, start = parts
    return ruler_arms.answer_by_retrieval(
        model, tokenizer, sample, strategy=strategy, setup=setup, rng=jax.random.key(0), start=start
    )


def dense(parts, setup, sample=SAMPLE):
    model, tokenizer, start = parts
    return ruler.run_sample(
        model, tokenizer, sample, attention="dense", setup=setup, rng=jax.random.key(0), config=certjax.Config(),
        start=start,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("setup", "strategy"),
    [("A", retrieval.TopK(budget=64, window=4)), ("B", retrieval.SoftmaxLift(budget=128, window=4))],
)
def test_all_keys_are_dense_attention(parts, setup, strategy):
    expected, found = dense(parts, setup), answer(parts, strategy, setup)
    assert (found.tokens, found.text) == (expected.tokens, expected.text)
    assert (found.steps, found.ended) == (expected.steps, expected.ended)


def test_few_keys_are_not(parts):
    assert answer(parts, retrieval.TopK(budget=1, window=1), "B").tokens != dense(parts, "B").tokens


def test_a_budget_of_one_is_the_prompts_own_token_in_setup_a(parts):
    sample = dataclasses.replace(SAMPLE, budget=1)
    found = answer(parts, retrieval.TopK(budget=1, window=1), "A", sample)
    assert found.tokens == dense(parts, "A", sample).tokens
    assert found.steps == 0


def test_names():
    assert ruler_arms.arm("softmax_lift", 32, 8) == retrieval.SoftmaxLift(budget=32, window=8, sinks=1)
    assert ruler_arms.arm("dense", 32, 8) == "dense"
    with pytest.raises(ValueError, match="budget"):
        ruler_arms.arm("top_k", 0, 8)
    described = [ruler_arms.describe(ruler_arms.arm(name, 32, 8)) for name in ruler_arms.NAMES]
    assert len(set(described)) == len(described)
    assert not any("0x" in text for text in described)
