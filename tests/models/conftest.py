"""Tiny GGUF files with known content, for the tests of the readers; quick compilation."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quants
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS, VOCAB = 64, 4, 2, 96, 2, 288
SPECIAL = ("<|begin|>", "<|end|>", "<|turn|>")
MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "1 2", "12 3", "Ã ©")


@dataclasses.dataclass(frozen=True)
class Written:
    """A GGUF file and the tensors that a reader must find in it, under their Hugging Face names."""

    path: Path
    tensors: dict[str, np.ndarray]


def tokens() -> list[str]:
    """Special tokens, the 256 bytes, what the merges make, a word that no merge makes, and padding up to VOCAB."""
    listed = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(m.replace(" ", "") for m in MERGES), "zq"]
    return listed + [f"[PAD{i}]" for i in range(VOCAB - len(listed))]


def hugging_face_tensors(arch: str, head_dim: int, tied: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for i in range(LAYERS):
        attention = f"model.layers.{i}.self_attn"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{attention}.{name}_proj.weight"] = (heads * head_dim, HIDDEN)
            if arch == "qwen2":
                shapes[f"{attention}.{name}_proj.bias"] = (heads * head_dim,)
            if arch == "qwen3" and name != "v":
                shapes[f"{attention}.{name}_norm.weight"] = (head_dim,)
        shapes[f"{attention}.o_proj.weight"] = (HIDDEN, HEADS * head_dim)
        for name in ("gate", "up"):
            shapes[f"model.layers.{i}.mlp.{name}_proj.weight"] = (FFN, HIDDEN)
        shapes[f"model.layers.{i}.mlp.down_proj.weight"] = (HIDDEN, FFN)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (HIDDEN,)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def stored_name(name: str) -> str:
    for long, short in (
        ("model.layers.", "blk."), ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"),
        ("lm_head", "output"), ("self_attn.o_proj", "attn_output"), ("self_attn.", "attn_"), ("mlp.", "ffn_"),
        ("post_attention_layernorm", "ffn_norm"), ("input_layernorm", "attn_norm"), ("_proj", ""),
    ):  # fmt: skip
        name = name.replace(long, short)
    return name


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: row r of half f of a head goes to row 2 r + f."""
    per_head = rows.shape[0] // heads
    order = [h * per_head + f * per_head // 2 + r for h in range(heads) for r in range(per_head // 2) for f in (0, 1)]
    return rows[order]


def llama3_factors(head_dim, theta, factor, low=1.0, high=4.0, original=8192):
    """After the definition: long waves are divided by `factor`, short ones by 1, and between on a line in 1 / λ."""
    factors = []
    for i in range(head_dim // 2):
        wave = 2 * np.pi * theta ** (2 * i / head_dim)
        if wave < original / high:
            factors.append(1.0)
        elif wave > original / low:
            factors.append(factor)
        else:
            share = (original / wave - low) / (high - low)
            factors.append(1 / ((1 - share) / factor + share))
    return np.array(factors, np.float32)


def _write(
    path: Path,
    arch: str = "llama",
    *,
    head_dim: int = HIDDEN // HEADS,
    tied: bool = False,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    omit: str | None = None,
) -> Written:
    """Writes a file. `metadata` replaces keys (None removes one), `extra` adds tensors, `omit` leaves one out."""
    tensors = hugging_face_tensors(arch, head_dim, tied)
    values: dict[str, Any] = {
        f"{arch}.block_count": LAYERS,
        f"{arch}.context_length": 4096,
        f"{arch}.embedding_length": HIDDEN,
        f"{arch}.feed_forward_length": FFN,
        f"{arch}.attention.head_count": HEADS,
        f"{arch}.attention.head_count_kv": KV_HEADS,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 500000.0,
        f"{arch}.rope.dimension_count": head_dim,
        f"{arch}.vocab_size": VOCAB,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (VOCAB - len(SPECIAL)),
        "tokenizer.ggml.merges": list(MERGES),
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 2,
        "tokenizer.chat_template": "{{ messages }}",
    } | dict(metadata or {})
    writer = GGUFWriter(path, arch)
    for key, value in values.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
        stored = interleaved(tensor, heads) if arch == "llama" and heads else tensor
        exact = tensor.ndim == 1 or kind == GGMLQuantizationType.F32
        if stored_name(name) == omit:
            continue
        if exact:
            writer.add_tensor(stored_name(name), stored)
        else:
            writer.add_tensor(stored_name(name), quants.quantize(stored, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Written(path, tensors)


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Written]:
    folder = tmp_path_factory.mktemp("gguf")
    count = iter(range(10**6))
    return lambda *args, **options: _write(folder / f"{next(count)}.gguf", *args, **options)


@pytest.fixture(autouse=True)
def quick_compilation(request):
    """Fewer optimisations in fast tests, for tiny models take far longer to compile than to run; slow tests see what
    users get.
    """
    quick = request.node.get_closest_marker("slow") is None
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
