"""Tiny random models: tests and examples need no download."""

from typing import Any

import numpy as np

from certjax.models.llama.config import LlamaConfig, RopeConfig
from certjax.models.llama.modeling import Llama
from certjax.models.llama.params import load_model, params_from_tensors, tensor_table


def dummy_config(**fields: Any) -> LlamaConfig:
    """Two layers, 4 query heads on 2 kv heads, head_dim 16, 64 tokens of vocabulary; `fields` override."""
    defaults: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": 4096,
        "norm_eps": 1e-5,
        "rope": RopeConfig(),
        "tied_embeddings": False,
        "qkv_bias": False,
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
    }
    fields = defaults | fields
    return LlamaConfig(**({"windows": (None,) * fields["num_layers"]} | fields))


def dummy_tensors(config: LlamaConfig, *, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Random weights under Hugging Face names: norms near 1, everything else of a size that keeps attention uneven."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, (path, shape, _) in tensor_table(config).items():
        noise = rng.standard_normal(shape)
        tensors[name] = (1 + 0.2 * noise if path[-1] == "scale" else 0.3 * noise).astype(dtype)
    return tensors


def dummy_model(config: LlamaConfig | None = None, *, seed: int = 0, dtype: Any = np.float32, **options: Any) -> Llama:
    """A model with `dummy_tensors`; `options` go to `load_model` (attention, certified_config)."""
    config = dummy_config() if config is None else config
    return load_model(params_from_tensors(config, dummy_tensors(config, seed=seed), dtype), config, **options)
