"""A model that reads bytes, as files, and a text for it."""

import json

import jax
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import certjax.models
from certjax.models import checkpoints
from certjax.models.dummy import dummy_config, dummy_tensors
from certjax.models.llama import LlamaConfig, load_model, params_from_tensors

TRAINED = 96  # positions of the model


def _write(path, positions):
    config = dummy_config(vocab_size=256, num_layers=1, max_positions=positions)
    content = {
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
    }
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokens = {"bos_token_id": 0, "eos_token_id": [], "add_bos_token": True, "chat_template": None}
    params = params_from_tensors(config, dummy_tensors(config))
    checkpoints.save(path, params, content, json.loads(tokenizer.to_str()), tokens)
    return str(path)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny model with a token for every byte, the first of them the begin-of-text token."""
    return _write(tmp_path_factory.mktemp("demo") / "model", TRAINED)


@pytest.fixture(scope="session")
def tokenizer_and_model(checkpoint):
    """Of the tiny model, with dense attention."""
    loaded = checkpoints.load(checkpoint)
    tokenizer = certjax.models.Tokenizer(loaded.tokenizer, loaded.tokenizer_config)
    return tokenizer, load_model(loaded.params, LlamaConfig.from_hf(loaded.config), attention="dense")


@pytest.fixture(scope="session")
def long_checkpoint(tmp_path_factory):
    """The same with room for 1024 tokens."""
    return _write(tmp_path_factory.mktemp("ruler") / "model", 1024)


@pytest.fixture
def text(tmp_path):
    """119 letters, 120 tokens."""
    path = tmp_path / "text"
    path.write_text("".join(chr(97 + i * i % 26) for i in range(119)))
    return str(path)


@pytest.fixture
def quick_compilation():
    """Tiny models take far longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
