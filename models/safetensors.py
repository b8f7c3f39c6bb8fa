"""Reads a Hugging Face model: safetensors files, alone or sharded, with config and tokenizer files beside them."""

import functools
import json
import math
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from certjax.models.source import LazyTensor, Source, cast, read_json
from certjax.models.tokenizer import build_tokenizer

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F64": np.float64}
_INDEX = "model.safetensors.index.json"
_PART = 1 << 22  # elements read at a time


def read_safetensors(path: str | os.PathLike[str]) -> Source:
    """Opens a model as hub clients download it. Tensors are read when asked for.

    Args:
      path: the model's folder, its one ``.safetensors`` file, or the ``.safetensors.index.json`` of its shards.
        ``config.json`` must lie beside; ``tokenizer.json``, ``tokenizer_config.json``, ``generation_config.json``
        and ``chat_template.jinja`` are used where present.

    Returns:
      The model; its tokenizer is None, with a message, where there is no ``tokenizer.json``.

    Raises:
      ValueError: a file or shard is missing, damaged or truncated, or a tensor is not floating point.
    """
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    places = _tensor_files(path)
    config = read_json(folder / "config.json")
    if config is None:
        raise ValueError(f"{folder / 'config.json'}: no such file; it is downloaded along with the weights")
    tokenizer = read_json(folder / "tokenizer.json")
    messages = () if tokenizer else (f"no tokenizer: {folder / 'tokenizer.json'} does not exist",)
    files = tuple(dict.fromkeys(places.values()))
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        tensors |= _open(file, {name for name, place in places.items() if place == file})
    return Source(config, tensors, tokenizer, _tokenizer_config(folder, config, tokenizer), files, messages)


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor names to the files that hold them."""
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder")
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if (path / _INDEX).exists():
            path = path / _INDEX
        elif (path / "model.safetensors").exists() or len(files) == 1:
            path = path / "model.safetensors" if len(files) != 1 else files[0]
        else:
            raise ValueError(f"{path}: {len(files)} .safetensors files and no {_INDEX}, expected one file or an index")
    if path.suffix != ".json":
        return dict.fromkeys(_names(path), path)
    weight_map = (read_json(path) or {}).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(f, str) and Path(f).name == f for f in weight_map.values()
    ):
        raise ValueError(f"{path}: expected an object 'weight_map' from tensor names to file names in the same folder")
    shards = set(weight_map.values())
    missing = sorted(shard for shard in shards if not (path.parent / shard).is_file())
    if missing:
        raise ValueError(f"{path.parent}: {len(missing)} of {len(shards)} shards are missing: {', '.join(missing)}")
    return {name: path.parent / shard for name, shard in weight_map.items()}


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="numpy") as handle:
            return list(handle.keys())
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error}); download it again") from None


def _open(file: Path, names: set[str]) -> dict[str, LazyTensor]:
    absent = sorted(names - set(_names(file)))
    if absent:
        raise ValueError(f"{file}: {len(absent)} tensors of the index are not in it: {', '.join(absent[:20])}")
    tensors, places = {}, _places(file)
    with safe_open(file, framework="numpy") as handle:
        for name in sorted(names):
            view = handle.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise ValueError(
                    f"{file}: tensor {name!r} is of type {view.get_dtype()}, expected one of {', '.join(_DTYPES)} "
                    "(a model quantised by other means must be converted to one of these first)"
                )
            dtype = np.dtype(_DTYPES[view.get_dtype()])
            shape = tuple(view.get_shape())
            load = functools.partial(_read, file, name, places[name], shape, dtype)
            tensors[name] = LazyTensor(name, shape, dtype, load)
    return tensors


def _places(file: Path) -> dict[str, int]:
    """Where each tensor begins in a file whose header has been checked."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read(file: Path, name: str, offset: int, shape: tuple[int, ...], stored: np.dtype, dtype: np.dtype) -> np.ndarray:
    """Read in parts, not mapped: no pages of the file and no second copy of the tensor are held beside the result."""
    out = np.empty(math.prod(shape), dtype)
    with file.open("rb") as stream:
        stream.seek(offset)
        for start in range(0, out.size, _PART):
            part = out[start : start + _PART]
            raw = np.fromfile(stream, np.uint8, part.size * stored.itemsize)
            if raw.size < part.size * stored.itemsize:
                raise ValueError(f"{file}: truncated while it was read: tensor {name!r}")
            part[...] = cast(name, raw.view(stored), dtype)
    return out.reshape(shape)


def _tokenizer_config(folder: Path, config: dict[str, Any], tokenizer: dict[str, Any] | None) -> dict[str, Any]:
    """Gathers what four files say about special tokens; the form is that of `Source`."""
    stated = read_json(folder / "tokenizer_config.json") or {}
    generation = read_json(folder / "generation_config.json") or {}
    built = None if tokenizer is None else build_tokenizer(tokenizer, str(folder / "tokenizer.json"))

    def ids(name: str) -> list[int]:
        found = [d.get(f"{name}_token_id") for d in (generation, config)]
        token = stated.get(f"{name}_token")
        token = token.get("content") if isinstance(token, dict) else token
        found.append(built.token_to_id(token) if built and isinstance(token, str) else None)
        flat = [i for item in found for i in (item if isinstance(item, list) else [item]) if i is not None]
        if not all(isinstance(i, int) for i in flat):
            raise ValueError(f"{folder}: {name}_token_id must be an integer or a list of integers, got {flat}")
        return flat

    bos = next(iter(ids("bos")), None)
    add_bos = stated.get("add_bos_token")
    if add_bos is None and built:  # then the post-processor of tokenizer.json decides
        add_bos = bos is not None and bos in built.encode("").ids
    end = stated.get("eos_token")
    template = stated.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == "default"), None
        )
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    return {
        "bos_token_id": bos,
        "eos_token_id": sorted(set(ids("eos"))),
        "add_bos_token": add_bos is True,
        "chat_template": template,
        "eos_token": end.get("content") if isinstance(end, dict) else end,
    }
