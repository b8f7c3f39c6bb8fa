"""Predictions of decode steps, rivals among them, and what is said of them."""

import numpy as np
import pytest

import certjax
from certjax.eval import divergence, inputs, loading, rivals, texts
from certjax.eval.methods.registry import METHODS
from certjax.models.llama import prefill

N, TAIL = 512, 40


@pytest.fixture(scope="module")
def read(checkpoint):
    loaded, tokenizer = loading.load(checkpoint)
    ids = inputs.tokens(texts.read("reference"), tokenizer, N + TAIL + 1)
    model = inputs.model_for(loaded, N + 64)
    return model, inputs.record(model, ids[:N], past=20, steps=4, spare=64), ids


def feed(read, attention, hints=None):
    model, recorded, ids = read
    config = certjax.Config(epsilon=0.3, delta=1e-3)
    return divergence.predictions(model, attention, recorded.caches, hints, ids[N:], config=config)


@pytest.fixture(scope="module")
def dense(read):
    return feed(read, "dense")


@pytest.mark.slow
def test_dense_predictions_are_those_of_the_forward_pass(read):
    """With float32 caches, so that nothing is rounded."""
    model, _, ids = read
    _, caches = prefill(model, [ids[:N]], model.init_caches(1, N + 64))
    config = certjax.Config()
    log_p, facts = divergence.predictions(model, "dense", caches, None, ids[N:], config=config)
    logits = np.asarray(model(np.asarray(ids[:-1])[None])[0, N:], np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(log_p, expected, atol=1e-4)
    row = divergence.row(log_p, facts, log_p, ids[N + 1 :])
    assert (row["kl_max"], row["top1_agreement"], row["relative_difference"]) == (0, 1, 0)
    nll = -expected[np.arange(TAIL), ids[N + 1 :]].mean()
    np.testing.assert_allclose(row["perplexity"], np.exp(nll), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["oracle_topk", "quest"])
def test_a_rival_that_may_read_everything_predicts_as_dense_attention(read, dense, name):
    model, recorded, ids = read
    rotary = tuple(x[0].reshape(N + 1, -1) for x in model.rotary(np.arange(N + 1)[None]))
    hints = rivals.make_indexes(METHODS[name], recorded, rotary, N)
    log_p, facts = feed(read, rivals.RivalAttention(METHODS[name]), hints)
    np.testing.assert_allclose(log_p, dense[0], atol=1e-4)
    np.testing.assert_array_equal(facts["keys_read"], N + 1 + np.arange(TAIL))
    few = rivals.make_indexes(METHODS[name], recorded, rotary, 80)
    row = divergence.row(*feed(read, rivals.RivalAttention(METHODS[name]), few), dense[0], ids[N + 1 :])
    assert row["keys"] <= 80 + (TAIL + 1) / 2
    assert row["kl_mean"] > 1e-3


@pytest.mark.slow
def test_numpy_methods_cannot_be_a_models_attention(read):
    with pytest.raises(ValueError, match="paper runs in numpy"):
        rivals.make_indexes(METHODS["paper"], read[1], (None, None), 1)


def test_row_by_hand():
    dense = np.log(np.array([[0.5, 0.5], [0.8, 0.2]], np.float32))
    other = np.log(np.array([[0.25, 0.75], [0.8, 0.2]], np.float32))
    facts = {name: np.ones(2) for name in ("keys_read", "bytes_read", "exact")}
    row = divergence.row(other, facts, dense, [0, 0])
    np.testing.assert_allclose(row["perplexity"], (0.25 * 0.8) ** -0.5, rtol=1e-6)
    np.testing.assert_allclose(row["perplexity_dense"], (0.5 * 0.8) ** -0.5, rtol=1e-6)
    kl = 0.5 * np.log(2) + 0.5 * np.log(0.5 / 0.75)
    np.testing.assert_allclose((row["kl_mean"], row["kl_max"]), (kl / 2, kl), rtol=1e-5)
    assert row["top1_agreement"] == 0.5
    np.testing.assert_allclose(row["nll_difference_error"], np.std([np.log(2), 0], ddof=1) / np.sqrt(2), rtol=1e-5)
