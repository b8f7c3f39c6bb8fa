"""Reads a GGUF file of the llama, qwen2 and qwen3 architectures into Hugging Face terms.

Facts on names, metadata keys and the rotary permutation: llama.cpp's converter and the GGUF specification.
"""

import functools
import os
import re
from pathlib import Path

import numpy as np

from certjax.models.gguf_container import GGUFFile, open_gguf
from certjax.models.gguf_metadata import Metadata, config_from_gguf
from certjax.models.gguf_tokenizer import tokenizer_from_gguf
from certjax.models.source import LazyTensor, Source

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(\w+)\.(weight|bias)")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def read_gguf(path: str | os.PathLike[str]) -> Source:
    """Opens a GGUF model. Tensors are dequantised when asked for, straight into the wanted dtype.

    The rows of q and k of the llama architecture are stored with the two halves of each head interleaved; they are
    put back. Without an output tensor the embeddings are tied.

    Args:
      path: a ``.gguf`` file.

    Returns:
      The model. Its tokenizer is None, with a message, where the file's kind of tokenizer is not supported.

    Raises:
      ValueError: the file is missing, damaged or truncated; it holds another architecture, a block format that cannot
        be dequantised, tensors unknown here, or a rotary scaling that the config cannot express exactly.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"{path}: no such file")
    file = open_gguf(path)
    metadata = Metadata(path, file.metadata)
    names = _hugging_face_names(file)
    config = config_from_gguf(metadata, file, names)
    tokenizer, tokenizer_config, messages = tokenizer_from_gguf(metadata, config["vocab_size"])
    heads = {}
    if metadata.architecture == "llama":
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = {name: _lazy(file, stored, name, heads, config["head_dim"]) for stored, name in names.items()}
    return Source(config, tensors, tokenizer, tokenizer_config, (path,), messages)


def _hugging_face_names(file: GGUFFile) -> dict[str, str]:
    names, unknown = {}, []
    for stored in file.tensors:
        match = _LAYER.fullmatch(stored)
        if stored in _NAMES:
            names[stored] = _NAMES[stored]
        elif match and match[2] in _LAYER_NAMES:
            names[stored] = f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
        elif stored != "rope_freqs.weight":  # becomes part of the config
            unknown.append(stored)
    if unknown:
        raise ValueError(
            f"{file.path}: tensors not known for a dense llama, qwen2 or qwen3 model: {', '.join(unknown[:20])}"
        )
    return names


def _lazy(file: GGUFFile, stored: str, name: str, heads: dict[str, int], head_dim: int) -> LazyTensor:
    """`heads`: for each projection whose rows are permuted, its number of heads."""
    shape = file.tensors[stored].shape
    load = functools.partial(file.read, stored)
    permuted = heads.get(name.split(".")[-2])
    if permuted is not None:
        if shape[0] != permuted * head_dim:
            raise ValueError(
                f"{file.path}: tensor {stored!r} has shape {shape}, expected {permuted} heads of {head_dim} rows each"
            )
        load = functools.partial(_unpermuted, file, stored, permuted)
    return LazyTensor(stored, shape, np.dtype(np.float32), load)


def _unpermuted(file: GGUFFile, stored: str, heads: int, dtype: np.dtype) -> np.ndarray:
    """Rows of a head stored as (pair, half) → (half, pair)."""
    array = file.read(stored, dtype)
    split = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(array.shape)
