"""The demo model against the reference implementation; CERTJAX_DEMO_CHECKPOINT names its folder."""

import functools
import os
import pathlib

import jax
import numpy as np
import pytest

from certjax.models import checkpoints
from certjax.models.llama import LlamaConfig, generate, load_model, prefill

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "smollm2_135m_q4_1.npz"
FOLDER = os.environ.get("CERTJAX_DEMO_CHECKPOINT", "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="CERTJAX_DEMO_CHECKPOINT is not set: convert the demo model first"),
]


@functools.cache
def model():
    checkpoint = checkpoints.load(FOLDER, dtype=np.float32)
    return load_model(checkpoint.params, LlamaConfig.from_hf(checkpoint.config), attention="dense")


@functools.cache
def golden():
    with np.load(GOLDEN) as file:
        return dict(file)


@pytest.mark.parametrize("j", [0, 1, 2])
def test_logits_and_likelihoods(j):
    ids, parts = golden()[f"ids_{j}"], []
    caches = model().init_caches(1, ids.size)
    last, _ = prefill(model(), [ids.tolist()], caches, chunk=64, on_logits=lambda _, x: parts.append(np.asarray(x[0])))
    np.testing.assert_allclose(last[0, golden()[f"top_ids_{j}"]], golden()[f"top_logits_{j}"], atol=2e-3)
    assert np.sort(np.asarray(last[0]))[-50] >= golden()[f"top_logits_{j}"].min() - 2e-3
    logits = np.concatenate(parts)[: ids.size - 1].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    nll = np.log(np.exp(logits).sum(-1)) - logits[np.arange(ids.size - 1), ids[1:]]
    np.testing.assert_allclose(nll, golden()[f"nll_{j}"], atol=2e-3)


def test_greedy_tokens():
    ids, expected = golden()["ids_0"], golden()["greedy_ids_0"]
    new = expected[ids.size :].tolist()
    result = generate(model(), [ids.tolist()], max_new_tokens=len(new), rng=jax.random.key(0), chunk=64)
    assert result.tokens[0].tolist() == new
