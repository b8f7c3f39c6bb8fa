"""Weights: from Hugging Face tensor names to the module tree, and from a tree of arrays to a model."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import certjax
from certjax.models.llama.config import LlamaConfig
from certjax.models.llama.modeling import DecodeAttention, Llama

# Tensor name (without ".weight" or ".bias"), module path and leaf. Kernels are [in, out] here, [out, in] there.
_LAYER_TABLE = (
    ("input_layernorm", "attention_norm", "scale"),
    ("self_attn.q_proj", "query", "kernel"),
    ("self_attn.k_proj", "key", "kernel"),
    ("self_attn.v_proj", "value", "kernel"),
    ("self_attn.q_norm", "query_norm", "scale"),
    ("self_attn.k_norm", "key_norm", "scale"),
    ("self_attn.o_proj", "output", "kernel"),
    ("post_attention_layernorm", "mlp_norm", "scale"),
    ("mlp.gate_proj", "gate", "kernel"),
    ("mlp.up_proj", "up", "kernel"),
    ("mlp.down_proj", "down", "kernel"),
)
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Old Llama checkpoints carry the rotary frequencies, which the configuration determines.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"

Params = dict[str, Any]
Path = tuple[str, ...]


def abstract_params(config: LlamaConfig, dtype: Any = jnp.float32) -> Params:
    """The tree that `load_model` expects: nested dicts, `jax.ShapeDtypeStruct` leaves; allocates nothing."""
    return _string_keys(nnx.to_pure_dict(nnx.state(_abstract_model(config, dtype))))


def tensor_table(config: LlamaConfig) -> dict[str, tuple[Path, tuple[int, ...], bool]]:
    """For every tensor of a checkpoint: its path in the tree, its shape in the file, whether it is transposed."""
    shapes = {path: leaf.shape for path, leaf in _leaves(abstract_params(config))}
    table = {}
    for name, path in _names(config.num_layers):
        if path in shapes:
            transposed = path[-1] == "kernel"
            table[name] = (path, shapes[path][::-1] if transposed else shapes[path], transposed)
    return table


def params_from_tensors(
    config: LlamaConfig, tensors: Mapping[str, np.ndarray | Callable[[], np.ndarray]], dtype: Any = np.float32
) -> Params:
    """Builds the parameter tree of a Hugging Face checkpoint.

    Args:
      config: the model.
      tensors: from checkpoint name to array, or to a function that reads it; each is read once, one at a time.
      dtype: of the result (float32, float16 or bfloat16).

    Returns:
      Nested dict with string keys and numpy leaves, as `abstract_params` lays it out.

    Raises:
      ValueError: one message that names every tensor that is missing, not used, or of the wrong shape; or an output
        projection that differs from the embedding although the configuration ties them.
    """
    table = tensor_table(config)
    params: Params = {}
    problems = [f"missing {name} {list(shape)}" for name, (_, shape, _) in table.items() if name not in tensors]
    for name in tensors:
        tied_head = name == _HEAD and config.tied_embeddings
        if name not in table and not tied_head and not name.endswith(_IGNORED_SUFFIX):
            problems.append(f"not used: {name}")
    for name, (path, shape, transposed) in table.items():
        if name not in tensors:
            continue
        array = _read(tensors[name])
        head = tensors.get(_HEAD) if name == _EMBEDDING and config.tied_embeddings else None
        if head is not None and not np.array_equal(_read(head), array):  # here, while little else is in memory
            problems.append(
                f"{_HEAD} differs from {_EMBEDDING}, but tie_word_embeddings = true says that they are one: file and "
                "config.json contradict each other; set tie_word_embeddings to false to use the separate weights"
            )
        if array.shape != shape:
            problems.append(f"{name} has shape {list(array.shape)}, expected {list(shape)}")
        elif not problems:  # nothing is converted once it is clear that the checkpoint cannot be used
            node = params
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = np.ascontiguousarray(array.T if transposed else array, dtype=dtype)
    if problems:
        raise ValueError(f"checkpoint does not fit the configuration: {'; '.join(problems)}")
    return params


def load_model(
    params: Params,
    config: LlamaConfig,
    *,
    attention: str | DecodeAttention = "certified",
    certified_config: "certjax.Config | None" = None,
) -> Llama:
    """Makes a model of arrays that exist already; they are not copied where JAX need not.

    Args:
      params: nested dict as `params_from_tensors` or a checkpoint gives it; arrays of any float dtype, kept as is.
      config: the model.
      attention: as for `Llama`.
      certified_config: as for `Llama`.

    Returns:
      The model. Calling again with another `attention` shares the arrays.

    Raises:
      ValueError: naming every parameter that is missing, unknown or of the wrong shape.
    """
    graph, state = nnx.split(_abstract_model(config))
    expected = {path: leaf.shape for path, leaf in _leaves(_string_keys(nnx.to_pure_dict(state)))}
    given = dict(_leaves(_string_keys(params)))
    problems = [f"missing {'.'.join(path)}" for path in expected if path not in given]
    problems += [f"unknown {'.'.join(path)}" for path in given if path not in expected]
    problems += [
        f"{'.'.join(path)} has shape {list(given[path].shape)}, expected {list(shape)}"
        for path, shape in expected.items()
        if path in given and given[path].shape != shape
    ]
    if problems:
        raise ValueError(f"parameters do not fit the configuration: {'; '.join(problems)}")
    flat = nnx.to_flat_state(state)
    leaves = [leaf.replace(jnp.asarray(given[tuple(map(str, path))])) for path, leaf in flat]
    model: Llama = nnx.merge(graph, nnx.from_flat_state(zip(flat.paths, leaves, strict=True)))
    return model.with_attention(attention, certified_config)


@functools.cache
def _abstract_model(config: LlamaConfig, dtype: Any = jnp.float32) -> Llama:
    """A model of shapes alone."""
    return nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))


def _names(num_layers: int) -> Iterator[tuple[str, Path]]:
    """Every tensor name that some model of the family has, with its path."""
    yield _EMBEDDING, ("embedding",)
    for i in range(num_layers):
        for source, module, leaf in _LAYER_TABLE:
            yield f"model.layers.{i}.{source}.weight", ("layers", str(i), module, leaf)
            if leaf == "kernel":
                yield f"model.layers.{i}.{source}.bias", ("layers", str(i), module, "bias")
    yield "model.norm.weight", ("norm", "scale")
    yield _HEAD, ("head", "kernel")


def _read(tensor: Any) -> np.ndarray:
    return np.asarray(tensor() if callable(tensor) else tensor)


def _string_keys(tree: Any) -> Any:
    """nnx.List has integer keys; checkpoints have strings."""
    return {str(k): _string_keys(v) for k, v in tree.items()} if isinstance(tree, Mapping) else tree


def _leaves(tree: Mapping[str, Any], prefix: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value
