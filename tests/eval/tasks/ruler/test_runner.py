"""One sample through a tiny model: both setups, all kinds of ends."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import certjax
from certjax.eval.tasks import ruler
from certjax.models.llama import generate

CONFIG = certjax.Config(epsilon=0.1, delta=1e-4)
# 64 positions, of which the begin-of-text token is one.
SAMPLE = ruler.Sample(
    "own-0", "own", 64, 0, "The quick brown fox.\n", "Which?", " The", ("fox",), 12, "all", 31, 1, "lines", ()
)


@pytest.fixture
def answer(tokenizer_and_model):
    tokenizer, model = tokenizer_and_model

    def answer(sample=SAMPLE, attention="dense", **options):
        options = {"setup": "A", "rng": jax.random.key(0), "config": CONFIG, "cache_dtype": "float32", **options}
        return ruler.run_sample(model, tokenizer, sample, attention=attention, **options)

    return answer


@pytest.fixture(scope="module")
def expected(tokenizer_and_model):
    """What the library's own generation says."""
    tokenizer, model = tokenizer_and_model
    prompt = tokenizer.encode(SAMPLE.context + SAMPLE.question + SAMPLE.answer_prefix)
    result = generate(model, [prompt], max_new_tokens=SAMPLE.budget, rng=jax.random.key(0))
    return result.tokens[0].tolist()


@pytest.mark.parametrize("setup", ["A", "B"])
@pytest.mark.parametrize("attention", ["dense", "certified"])
def test_both_setups_are_greedy_generation(setup, attention, answer, expected, tokenizer_and_model):
    result = answer(setup=setup, attention=attention)  # so short a context is exact with either attention
    assert result.tokens == expected
    assert result.text == tokenizer_and_model[0].decode(expected)
    assert not result.ended
    fed = len("Which? The") if setup == "B" else 0
    assert result.steps == fed + SAMPLE.budget - 1
    assert result.statistics["exact"] == 1


def test_a_start_serves_many_answers(answer, expected, tokenizer_and_model):
    tokenizer, model = tokenizer_and_model
    start = ruler.read(model, tokenizer, SAMPLE, cache_dtype="float32")
    for setup in ("B", "A", "B"):
        assert answer(setup=setup, start=start).tokens == expected


def test_setup_b_gives_the_question_to_the_attention(answer):
    def wrong(query, cache, *, rng, hint, config):
        result = certjax.dense_decode_attention(query, cache, config=config)
        return dataclasses.replace(result, output=jnp.full_like(result.output, 100))

    a, b = answer(attention=wrong), answer(attention=wrong, setup="B")
    assert a.tokens[0] == answer().tokens[0]  # the dense prompt chose it
    assert b.tokens[0] != a.tokens[0]


def test_ends(answer, expected):
    fourth = expected[3]
    others = set(range(256)) - set(expected)
    result = answer(end_ids={min(others), fourth, max(others)})
    assert result.tokens == expected[: expected.index(fourth) + 1]
    assert result.ended
    result = answer(dataclasses.replace(SAMPLE, budget=1))
    assert (result.tokens, result.steps, result.statistics) == (expected[:1], 0, {})


def test_what_does_not_fit_is_refused(answer):
    with pytest.raises(ValueError, match=r"own-0: 32 tokens, .* and 33 for the answer exceed its length of 64"):
        answer(dataclasses.replace(SAMPLE, budget=33))
    with pytest.raises(
        ValueError, match=r"32 tokens, .* and 65 for the answer exceed the model's longest context of 96"
    ):
        answer(dataclasses.replace(SAMPLE, budget=65, length=128))
    with pytest.raises(ValueError, match='setup must be "A" or "B"'):
        answer(setup="C")
