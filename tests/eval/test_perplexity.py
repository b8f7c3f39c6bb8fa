"""Perplexity through decode steps."""

import jax
import numpy as np
import pytest

from certjax.eval import demo, perplexity
from certjax.models import Tokenizer, checkpoints
from certjax.models.llama import LlamaConfig, load_model


def test_dense_is_the_forward_pass_and_exact_heads_change_nothing(checkpoint, text):
    """120 tokens, the last 64 fed one by one; a pool so small is read exactly, whatever the attention is called."""
    result = perplexity.run(checkpoint, prompt_file=text, tokens=120, tail=64)
    loaded = checkpoints.load(checkpoint)
    with open(text) as file:
        ids = np.asarray(Tokenizer(loaded.tokenizer, loaded.tokenizer_config).encode(file.read()))
    model = load_model(loaded.params, demo.stretched(LlamaConfig.from_hf(loaded.config), 128))
    logits = jax.nn.log_softmax(jax.jit(lambda model, ids: model(ids))(model, ids[None])[0])
    expected = np.exp(-np.asarray(logits)[np.arange(55, 119), ids[56:]].mean())
    np.testing.assert_allclose(result["perplexity_dense"], expected, rtol=1e-3)  # the caches are bfloat16
    assert result["perplexity_certified"] == result["perplexity_dense"]
    assert (result["divergence_largest"], result["agreement"], result["exact_share"]) == (0, 1, 1)
    assert result["all_certified"]
    assert result["stretch"] == pytest.approx(128 / 96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tail": 65}, "tail must be a multiple of 64 below tokens = 100: got 65"),
        ({"tail": 128}, "tail must be a multiple of 64 below tokens = 100: got 128"),
        ({"tokens": 121}, "text has 120 tokens, fewer than tokens = 121; give a longer text"),
    ],
)
def test_mistakes(checkpoint, text, options, message):
    with pytest.raises(ValueError, match=message):
        perplexity.run(checkpoint, prompt_file=text, **({"tokens": 100, "tail": 64} | options))
