"""GGUF metadata → Hugging Face config. A key that would change the model and has no place in the config is an error."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from certjax.models.gguf_container import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_UNUSED = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "expert_count", "expert_used_count"})


class Metadata:
    """Typed access to the metadata of one file.

    Attributes:
      path: the file, for messages.
      architecture: ``general.architecture``, one of `ARCHITECTURES`.
    """

    def __init__(self, path: Path, values: dict[str, Any]):
        self.path, self.values = path, values
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
            raise self.fail("general.architecture", f"one of {', '.join(ARCHITECTURES)}")
        self.architecture = architecture

    def fail(self, key: str, expected: str) -> ValueError:
        """The error for a key whose value is missing or of the wrong kind."""
        got = repr(self.values[key])[:80] if key in self.values else "nothing"
        return ValueError(f"{self.path}: metadata {key} must be {expected}, got {got}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer of the architecture; a list of equal ones (per layer) counts as one."""
        key = f"{self.architecture}.{name}"
        value = self.values.get(key, default)
        if isinstance(value, list) and value and value.count(value[0]) == len(value):
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.fail(key, "a positive integer, the same for all layers")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number of the architecture, as the shortest decimal where it is stored in float32."""
        key = f"{self.architecture}.{name}"
        value = self.values.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.fail(key, "a positive finite number")
        with np.errstate(over="ignore"):
            single = np.float32(value)
        return float(str(single)) if single == value else float(value)

    def has(self, name: str) -> bool:
        """Whether the architecture has the key."""
        return f"{self.architecture}.{name}" in self.values


_KEYS = frozenset(
    {
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "attention.sliding_window",
        "rope.freq_base", "rope.dimension_count", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
        "rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_ext_factor",
    }
)  # fmt: skip


def config_from_gguf(metadata: Metadata, file: GGUFFile, names: dict[str, str]) -> dict[str, Any]:
    """Builds the Hugging Face config of a GGUF file.

    Args:
      metadata: the file's metadata.
      file: the open file, for the sizes that tensors tell.
      names: stored tensor names to Hugging Face names.

    Returns:
      The content of a ``config.json`` (rotary scaling in the ``rope_scaling`` spelling).

    Raises:
      ValueError: a key is missing, impossible or unsupported.
    """
    arch = metadata.architecture
    own = {key[len(arch) + 1 :] for key in metadata.values if key.startswith(f"{arch}.")}
    unknown = sorted(own - _KEYS - _UNUSED)
    if any(metadata.values.get(f"{arch}.{key}") for key in ("expert_count", "expert_used_count")):
        unknown.append("expert_count")
    if unknown:
        raise ValueError(
            f"{metadata.path}: metadata not supported for {arch}: {', '.join(f'{arch}.{k}' for k in unknown)}"
        )
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{metadata.path}: tensor token_embd.weight is missing")
    vocab_size, hidden = (*file.tensors["token_embd.weight"].shape, 0)[:2]
    heads = metadata.integer("attention.head_count")
    head_dim = metadata.integer("attention.key_length", metadata.integer("embedding_length") // heads)
    layers = metadata.integer("block_count")
    for name, value, expected in (
        ("embedding_length", metadata.integer("embedding_length"), hidden),
        ("vocab_size", metadata.integer("vocab_size", vocab_size), vocab_size),
        ("attention.value_length", metadata.integer("attention.value_length", head_dim), head_dim),
        ("rope.dimension_count", metadata.integer("rope.dimension_count", head_dim), head_dim),
        ("block_count", layers, len({n.split(".")[2] for n in names.values() if n.startswith("model.layers.")})),
    ):
        if value != expected:
            raise metadata.fail(f"{arch}.{name}", f"{expected}, to agree with the tensors and head size")
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[arch]],
        "model_type": arch,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": metadata.integer("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if arch == "llama":
        config["attention_bias"] = any(n.endswith("_proj.bias") and ".self_attn." in n for n in names.values())
        config["mlp_bias"] = any(n.endswith("_proj.bias") and ".mlp." in n for n in names.values())
    if metadata.has("attention.sliding_window"):
        if arch != "llama":
            raise metadata.fail(f"{arch}.attention.sliding_window", "absent: which layers it is for is not recorded")
        del config["attention_bias"], config["mlp_bias"]
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
        config["sliding_window"] = metadata.integer("attention.sliding_window")
    scaling = _rope_scaling(metadata, file, config["rope_theta"], head_dim)
    return config if scaling is None else config | {"rope_scaling": scaling}


def _rope_scaling(metadata: Metadata, file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    arch = metadata.architecture
    kind = metadata.values.get(f"{arch}.rope.scaling.type", "none")
    if kind == "none" and metadata.has("rope.scale_linear") and metadata.number("rope.scale_linear") != 1:
        kind = "linear"
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor"):
        if metadata.has(f"rope.scaling.{name}") and metadata.values[f"{arch}.rope.scaling.{name}"] != 1:
            raise metadata.fail(f"{arch}.rope.scaling.{name}", "1 or absent")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise metadata.fail(f"{arch}.rope.scaling.type", "absent beside the tensor rope_freqs.weight")
        return _llama3_scaling(file, theta, head_dim)
    if kind == "none":
        return None
    if kind == "linear":
        name = "rope.scaling.factor" if metadata.has("rope.scaling.factor") else "rope.scale_linear"
        return {"rope_type": "linear", "factor": metadata.number(name)}
    if kind != "yarn":
        raise metadata.fail(f"{arch}.rope.scaling.type", "none, linear or yarn")
    scaling = {
        "rope_type": "yarn",
        "factor": metadata.number("rope.scaling.factor"),
        "original_max_position_embeddings": metadata.integer("rope.scaling.original_context_length"),
    }
    for name in ("beta_fast", "beta_slow"):
        if metadata.has(f"rope.scaling.yarn_{name}"):
            scaling[name] = metadata.number(f"rope.scaling.yarn_{name}")
    return scaling


def _llama3_scaling(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any] | None:
    """The tensor holds what each frequency is divided by; find the llama3 fields that give it.

    The factor is the last entry, and the other three fields are those of every released Llama 3.1 to 3.3.
    """
    factors = file.read("rope_freqs.weight").astype(np.float64)
    if np.array_equal(factors, np.ones(head_dim // 2)):
        return None
    low, high, original = 1.0, 4.0, 8192
    if factors.shape == (head_dim // 2,):
        factor = float(factors[-1])
        with np.errstate(all="ignore"):  # a damaged tensor is told below
            wavelength = 2 * np.pi * theta ** (2 * np.arange(head_dim // 2) / head_dim)
            smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
            expected = 1 / ((1 - smooth) / factor + smooth)
            if np.allclose(factors, expected, rtol=1e-5, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": original,
                }
    raise ValueError(
        f"{file.path}: the frequency factors in tensor rope_freqs.weight are not those of a llama3 scaling with "
        f"low_freq_factor {low}, high_freq_factor {high} and {original} original positions, so they cannot be written "
        "as config fields; convert the model from its safetensors files instead"
    )
