"""The golden models in files of the `gguf` package are what they are from safetensors; every block format is read."""

import json
from pathlib import Path

import chex
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, RopeScalingType, quants
from safetensors.numpy import load_file

from certjax.models import convert, gguf_container
from certjax.models.gguf import read_gguf
from certjax.models.gguf_container import open_gguf
from certjax.models.llama import LlamaConfig, params_from_tensors
from tests.models.conftest import interleaved, llama3_factors, stored_name

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())


def write(path, folder):
    """What llama.cpp's converter makes of a folder, all tensors in float32."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    arch = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    rope = config["rope_parameters"]
    writer = GGUFWriter(path, arch)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(head_dim, rope["rope_theta"], rope["factor"]))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2]) if arch == "llama" else None
        writer.add_tensor(stored_name(name), interleaved(tensor, count) if count else tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# Pitfall 19: rows of q and k are permuted for the llama architecture alone, those of k by the number of kv heads.
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_as_from_safetensors(tmp_path, family):
    source = read_gguf(write(tmp_path / "model.gguf", GOLDEN / family))
    config = LlamaConfig.from_hf(source.config)
    assert config == LlamaConfig.from_hf(json.loads((GOLDEN / family / "config.json").read_text()))
    truth = params_from_tensors(config, load_file(GOLDEN / family / "model.safetensors"))
    chex.assert_trees_all_equal(params_from_tensors(config, source.tensors), truth, strict=True)


@pytest.mark.parametrize("family", ["llama31", "qwen2"])
def test_logits(tmp_path, family):
    path = write(tmp_path / "model.gguf", GOLDEN / family)
    summary = convert(path, tmp_path / "model", check=GOLDEN / family / "golden.npz")
    assert "logits are those of" in summary.messages[-1]


FORMATS = sorted(kind.name for kind in gguf_container.readable_types().values())


def test_formats_that_people_have():
    names = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q4_K Q5_K Q6_K"
    assert set(names.split()) <= set(FORMATS)


@pytest.mark.parametrize("name", FORMATS)
def test_every_block_format_is_dequantised_as_by_the_package(tmp_path, monkeypatch, name):
    """Any bytes: scales may be infinite or no numbers."""
    kind = GGMLQuantizationType[name]
    block, size = GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(1).integers(0, 256, (2, 5, 512 // block * size), np.uint8)
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(gguf_container, "_SLAB", 512 * 3)  # slabs that do not divide the rows
    read = open_gguf(tmp_path / "x.gguf").read("x")
    with np.errstate(all="ignore"):
        expected = quants.dequantize(packed, kind)
    assert read.shape == (2, 5, 512)
    assert np.isfinite(read).mean() > 0.5
    chex.assert_trees_all_equal(read, expected.astype(np.float32))
