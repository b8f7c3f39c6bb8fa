"""GGUF: names, permutation, block formats, config, tokenizer; and no damage gets past it but as a ValueError."""

import chex
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st

from certjax.models import gguf_container
from certjax.models.gguf import read_gguf
from certjax.models.llama.config import LlamaConfig
from certjax.models.llama.params import params_from_tensors
from tests.models.conftest import llama3_factors


def whole(path):
    """Reads everything that a conversion reads."""
    source = read_gguf(path)
    config = LlamaConfig.from_hf(source.config)
    return source, params_from_tensors(config, source.tensors, np.float32)


# Pitfalls 19 and 23.
@pytest.mark.parametrize(
    ("arch", "head_dim", "tied"), [("llama", 16, False), ("llama", 32, True), ("qwen2", 16, True), ("qwen3", 32, False)]
)
def test_tensors_are_those_of_the_model(write_gguf, arch, head_dim, tied):
    file = write_gguf(arch, head_dim=head_dim, tied=tied)
    source, _ = whole(file.path)
    assert source.config["tie_word_embeddings"] == tied
    chex.assert_trees_all_equal({k: np.asarray(v) for k, v in source.tensors.items()}, file.tensors, strict=True)
    assert {k: v.shape for k, v in source.tensors.items()} == {k: v.shape for k, v in file.tensors.items()}


def test_biases_of_the_llama_architecture_are_permuted_too(write_gguf):
    rng = np.random.default_rng(5)
    truth, stored = {}, {}
    for i in range(2):
        for name, heads, size in (("q", 4, 64), ("k", 2, 32), ("v", 0, 32), ("output", 0, 64)):
            bias = rng.standard_normal(size, np.float32)
            truth[f"model.layers.{i}.self_attn.{name[0]}_proj.bias"] = bias
            pairs = bias.reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1) if heads else bias
            stored[f"blk.{i}.attn_{name}.bias"] = pairs
    source, _ = whole(write_gguf("llama", extra=stored).path)
    assert source.config["attention_bias"] is True
    chex.assert_trees_all_equal({name: np.asarray(source.tensors[name]) for name in truth}, truth, strict=True)


def test_config(write_gguf):
    config = read_gguf(write_gguf("llama", head_dim=32).path).config
    assert config == {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 288, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip


def test_optional_keys_have_their_defaults(write_gguf):
    names = (
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
        "rope.freq_base",
        "vocab_size",
    )
    absent = {f"qwen2.{name}": None for name in (*names[1:], "rope.dimension_count")}
    config = read_gguf(write_gguf("qwen2", metadata=absent).path).config
    assert (config["head_dim"], config["rope_theta"], config["vocab_size"]) == (16, 10000.0, 288)
    assert "attention_bias" not in config
    per_layer = write_gguf("qwen2", metadata={"qwen2.attention.head_count_kv": [2, 2]})
    assert read_gguf(per_layer.path).config["num_key_value_heads"] == 2


def test_window_makes_a_mistral(write_gguf):
    config = read_gguf(write_gguf("llama", metadata={"llama.attention.sliding_window": 128}).path).config
    assert LlamaConfig.from_hf(config).windows == (128, 128)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_block_formats(write_gguf, monkeypatch, kind):
    quantization = GGMLQuantizationType[kind]
    monkeypatch.setattr(gguf_container, "_SLAB", 64 * 7)  # slabs that do not divide the rows
    file = write_gguf("llama", kind=quantization)
    source = read_gguf(file.path)
    coarsest = {"F16": 2e-3, "BF16": 8e-3, "Q8_0": 0.02, "Q5_1": 0.13, "Q4_1": 0.25, "Q4_0": 0.36}[kind]
    for name, truth in file.tensors.items():
        read = np.asarray(source.tensors[name])
        chex.assert_trees_all_close(read, truth, atol=coarsest, rtol=coarsest / 8)
        if truth.ndim == 2:
            chex.assert_trees_all_equal(read, quants.dequantize(quants.quantize(truth, quantization), quantization))


def test_reads_straight_into_a_dtype(write_gguf):
    file = write_gguf("llama")
    source = read_gguf(file.path)
    for name, tensor in source.tensors.items():
        read = np.asarray(tensor, dtype=ml_dtypes.bfloat16)
        chex.assert_trees_all_equal(read, file.tensors[name].astype(ml_dtypes.bfloat16), strict=True)
    with pytest.raises(ValueError, match=r"without a copy"):
        np.array(tensor, copy=False)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recognised(write_gguf, factor):
    factors = llama3_factors(16, 500000.0, factor)
    assert np.sum((factors > 1) & (factors < factor)) > 1 or len(set(factors)) > 2
    config = read_gguf(write_gguf("llama", extra={"rope_freqs.weight": factors}).path).config
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    LlamaConfig.from_hf(config)


def test_factors_of_one_are_no_scaling(write_gguf):
    file = write_gguf("llama", extra={"rope_freqs.weight": np.ones(8, np.float32)})
    assert "rope_scaling" not in read_gguf(file.path).config


@pytest.mark.parametrize(
    "factors",
    [llama3_factors(16, 500000.0, 8.0, original=4096), llama3_factors(16, 1e4, 8.0), np.full(7, 8.0, np.float32),
     np.full(8, np.nan, np.float32), np.zeros(8, np.float32)],
)  # fmt: skip
def test_other_factors_are_refused(write_gguf, factors):
    with pytest.raises(ValueError, match=r"rope_freqs\.weight are not those of a llama3 scaling"):
        read_gguf(write_gguf("llama", extra={"rope_freqs.weight": factors}).path)


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": "none", "factor": 4.0}, None),
        (
            {"type": "yarn", "factor": 2.5, "original_context_length": 2048, "yarn_beta_fast": 16.0},
            {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 2048, "beta_fast": 16.0},
        ),
    ],
)
def test_stated_scaling(write_gguf, keys, scaling):
    metadata = {f"qwen2.rope.scaling.{name}": value for name, value in keys.items()}
    config = read_gguf(write_gguf("qwen2", metadata=metadata).path).config
    assert config.get("rope_scaling") == scaling
    LlamaConfig.from_hf(config)


FACTORS = {"rope_freqs.weight": np.ones(8, np.float32)}


@pytest.mark.parametrize(
    ("metadata", "options", "message"),
    [
        ({"general.architecture": "gpt2"}, {}, r"general\.architecture must be one of llama, qwen2, qwen3, got 'gpt2'"),
        ({"general.architecture": ["llama"]}, {}, r"general\.architecture must be one of"),
        ({"llama.block_count": None}, {}, r"llama\.block_count must be a positive integer.*, got nothing"),
        ({"llama.block_count": 3}, {}, r"llama\.block_count must be 2.*, got 3"),
        ({"llama.embedding_length": 128}, {}, r"llama\.embedding_length must be 64.*, got 128"),
        ({"llama.vocab_size": 5}, {}, r"llama\.vocab_size must be 288.*, got 5"),
        ({"llama.attention.head_count": 0}, {}, r"llama\.attention\.head_count must be a positive integer"),
        ({"llama.attention.head_count": "4"}, {}, r"llama\.attention\.head_count must be a positive integer"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, r"head_count_kv must be a positive integer, the same for all"),
        ({"llama.attention.head_count": 3}, {}, r"attn_q\.weight' has shape \(64, 64\), expected 3 heads of 16 rows"),
        ({"llama.attention.value_length": 8}, {}, r"llama\.attention\.value_length must be 16"),
        ({"llama.rope.dimension_count": 8}, {}, r"llama\.rope\.dimension_count must be 16"),
        ({"llama.rope.freq_base": float("inf")}, {}, r"llama\.rope\.freq_base must be a positive finite number"),
        ({"llama.expert_count": 8}, {}, r"not supported.*llama\.expert_count"),
        ({"llama.logit_scale": 0.5}, {}, r"not supported.*llama\.logit_scale"),
        ({"llama.rope.scaling.type": "longrope"}, {}, r"rope\.scaling\.type must be none, linear or yarn"),
        ({"llama.rope.scaling.type": "linear"}, {"extra": FACTORS}, r"scaling\.type must be absent beside"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0}, {}, r"original_context_length must be"),
        ({"llama.rope.scaling.attn_factor": 0.7}, {}, r"rope\.scaling\.attn_factor must be 1 or absent"),
        ({"tokenizer.ggml.eos_token_id": 288}, {}, r"eos_token_id must be a token id below 288, got 288"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, {}, r"tokenizer\.ggml\.tokens must be at most 288 different tokens"),
        ({"tokenizer.ggml.token_type": [1]}, {}, r"tokenizer\.ggml\.token_type must be 288 numbers"),
        ({"tokenizer.ggml.merges": ["h zz"]}, {}, r"tokenizer\.ggml\.merges: expected two tokens that make a third"),
        ({"tokenizer.ggml.merges": None}, {}, r"tokenizer\.ggml\.merges must be a list of str, got nothing"),
        ({}, {"extra": {"blk.0.ffn_gate_exps.weight": np.ones(4, np.float32)}}, r"not known.*: blk\.0\.ffn_gate_exps"),
        ({}, {"extra": {"blk.0.attn_sinks.weight": np.ones(4, np.int8)}}, r"attn_sinks\.weight' is of type I8"),
        ({}, {"omit": "token_embd.weight"}, r"tensor token_embd\.weight is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(write_gguf, metadata, options, message):
    path = write_gguf("llama", metadata=metadata, **options).path
    with pytest.raises(ValueError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_a_missing_tensor_is_named(write_gguf):
    with pytest.raises(ValueError, match=r"missing model\.layers\.1\.mlp\.up_proj\.weight"):
        whole(write_gguf("llama", omit="blk.1.ffn_up.weight").path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"not a GGUF file: 0 bytes"),
        (b"GGML" + bytes(40), r"it starts with b'GGML', expected b'GGUF'"),
        (b"GGUF" + (1).to_bytes(4, "little") + bytes(40), r"GGUF version 1, expected 2 or 3"),
        (b"GGUF" + (3).to_bytes(4, "big") + bytes(40), r"little-endian"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16 + bytes(40), r"damaged GGUF header.*entries.* promised"),
    ],
)
def test_other_files(tmp_path, content, message):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_gguf(tmp_path / "x")
    with pytest.raises(ValueError, match=r"no such file"):
        read_gguf(tmp_path / "y")


@pytest.fixture(scope="module")
def small(write_gguf, tmp_path_factory):
    """(bytes of a file, length of its header, end of its last tensor, scratch path)."""
    path = write_gguf("llama", tied=True, extra={"rope_freqs.weight": llama3_factors(16, 500000.0, 8.0)}).path
    file = gguf_container.open_gguf(path)
    start = min(t.offset for t in file.tensors.values())
    end = max(t.offset + t.nbytes for t in file.tensors.values())
    return path.read_bytes(), start, end, tmp_path_factory.mktemp("damaged") / "model.gguf"


@given(share=st.floats(0, 1, exclude_max=True), in_header=st.booleans())
def test_truncated_anywhere(small, share, in_header):
    content, start, end, path = small
    path.write_bytes(content[: int(share * (start if in_header else end))])
    with pytest.raises(ValueError, match=r"truncated|damaged GGUF header|not a GGUF file"):
        whole(path)


@pytest.mark.parametrize("seed", range(8))
def test_flipped_header_bytes(small, seed):
    """Most damage is seen, some only changes a name or a number; nothing but a ValueError comes out."""
    content, start, _, path = small
    rng = np.random.default_rng(seed)
    refused = 0
    for _ in range(40):
        damaged = bytearray(content)
        # Half of the damage goes where the structure is: everything before the long lists, and the tensor table.
        position = int(
            rng.integers(0, start) if rng.random() < 0.5 else rng.choice([*range(900), *range(start - 900, start)])
        )
        damaged[position] ^= int(rng.integers(1, 256))
        path.write_bytes(damaged)
        try:
            whole(path)
        except ValueError:
            refused += 1
    assert refused > 8


def test_unsupported_tokenizer_leaves_the_model(write_gguf):
    for metadata, message in (
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"tokenizer.ggml.pre": "tekken"}, "pre-tokenizer 'tekken' is not supported"),
        ({"tokenizer.ggml.pre": ["smollm"]}, "pre-tokenizer ['smollm'] is not supported"),
        ({"tokenizer.ggml.pre": None}, "pre-tokenizer None is not supported"),
    ):
        source, _ = whole(write_gguf("llama", metadata=metadata).path)
        assert source.tokenizer is None
        assert message in source.messages[0]
    source = read_gguf(write_gguf("llama").path)
    assert source.messages == ()
    assert source.tokenizer_config == {
        "bos_token_id": 0, "eos_token_id": [1, 2], "add_bos_token": True, "chat_template": "{{ messages }}",
        "eos_token": "<|end|>",
    }  # fmt: skip
