"""What a session remembers, and that it makes no difference to what is said."""

import functools

import jax
import numpy as np
import pytest

import certjax
from certjax.eval import generate
from certjax.eval.session import Answer, Session, certificate_summary
from certjax.models.dummy import dummy_config, dummy_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

KEY = jax.random.key(1)
PROMPT = np.random.default_rng(6).integers(0, 64, 90).tolist()


@functools.cache
def model():
    return dummy_model(dummy_config(num_layers=1), attention="dense")


def fresh(ids, **options):
    return Session(model(), 512).answer(ids, max_new_tokens=8, rng=KEY, **options)


def test_reads_only_what_is_new():
    session = Session(model(), 512)
    ask = lambda ids: session.answer(ids, max_new_tokens=8, rng=KEY)
    first = ask(PROMPT)
    assert (first.tokens, first.read, first.finish_reason) == (fresh(PROMPT).tokens, 90, "length")
    longer = [*PROMPT, *first.tokens, 5, 6]
    second = ask(longer)
    assert (second.tokens, second.read) == (fresh(longer).tokens, 3)  # the last token of an answer was never fed
    other = [*PROMPT[:70], 1, 2, 3]  # in the middle of a block
    third = ask(other)
    assert (third.tokens, third.read) == (fresh(other).tokens, 3)
    elsewhere = [63 - PROMPT[0], *PROMPT[1:]]
    assert ask(elsewhere).read == 90


def test_stops_and_counts():
    tokens = fresh(PROMPT).tokens
    heard = []
    session = Session(model(), 512, end_ids=[tokens[3], 63 - tokens[3]])
    answer = session.answer(PROMPT, max_new_tokens=8, rng=KEY, on_token=heard.append)
    count = tokens.index(tokens[3]) + 1
    assert (answer.tokens, answer.finish_reason, heard) == (tokens[:count], "stop", tokens[:count])
    assert {x.shape for x in answer.statistics.values()} == {(count - 1, 1, 4)}
    assert answer.prefill_s > 0
    promise = certjax.Config(epsilon=0.2, delta=0.07)
    summary = certificate_summary(answer, promise, "generation", 8)
    assert summary["calls"] == summary["exact"] == 4 * (count - 1)
    assert summary["delta_per_call"] == pytest.approx(0.07 / 28)
    assert summary["delta_spent"] == pytest.approx(0.07 * (count - 1) / 7)
    assert summary["keys_read_per_sampled_call"] is None
    assert certificate_summary(answer, promise, "call", 8)["delta_per_call"] == 0.07


def test_limits():
    """Row 68 of pitfalls.md."""
    with pytest.raises(ValueError, match="context of 4097 tokens exceeds the model's 4096"):
        Session(model(), 4097)
    with pytest.raises(ValueError, match=r"prompt of 90 tokens and 8 new ones exceed the context of 97"):
        Session(model(), 97).answer(PROMPT, max_new_tokens=8, rng=KEY)


def test_an_answer_that_breaks_off_leaves_nothing_behind():
    session = Session(model(), 512)
    with pytest.raises(BrokenPipeError):
        session.answer(PROMPT, max_new_tokens=8, rng=KEY, on_token=lambda token: (_ for _ in ()).throw(BrokenPipeError))
    answer = session.answer(PROMPT, max_new_tokens=8, rng=KEY)
    assert (answer.tokens, answer.read) == (fresh(PROMPT).tokens, 90)


def test_summary_tells_sampled_exact_and_neither_apart():
    certified = np.array([[[True, True, False, True]]])
    exact = np.array([[[True, False, False, False]]])
    statistics = {"certified": certified, "exact": exact, "keys_read": np.array([[[900, 10, 500, 20]]])}
    answer = Answer([1, 2], "length", statistics, 5, 0.1, 0.1, None)
    summary = certificate_summary(answer, certjax.Config(), "generation", 2)
    found = {name: summary[name] for name in ("calls", "certified", "sampled", "exact", "keys_read_per_sampled_call")}
    assert found == {"calls": 4, "certified": 3, "sampled": 2, "exact": 1, "keys_read_per_sampled_call": 15}
    assert generate._line(answer, summary).endswith("2 sampled and 1 exact; 1 without a certificate]")
