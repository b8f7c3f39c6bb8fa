"""The result of reading a document, in a file: a long prefill takes minutes, and the same caches serve many runs."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
import uuid
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import certjax
from certjax.models.llama import Llama

# Raise it when a field of KVCache, or what a prefill writes to it, changes its meaning.
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Prefill:
    """What a prefill of one row left.

    Attributes:
      logits: float32 [1, V] after the last token.
      caches: one `KVCache` a layer.
      seconds: that it took.
    """

    logits: jax.Array
    caches: tuple["certjax.KVCache", ...]
    seconds: float


def file_name(checkpoint: str | os.PathLike[str], model: Llama, ids: Sequence[int], capacity: int, dtype: str) -> str:
    """A name that differs wherever the prefill would: weights, model with its position scaling, tokens, cache, format.

    Args:
      checkpoint: folder of the model; its manifest holds a checksum of every array.
      model: the model.
      ids: tokens of the document.
      capacity: S, tokens that a cache can hold.
      dtype: of the caches.
    """
    manifest = (Path(checkpoint) / "manifest.json").read_text(encoding="utf-8")
    parts = [FORMAT_VERSION, manifest, repr(model.config), [int(i) for i in ids], capacity, dtype]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32] + ".npz"


def write(path: Path, prefill: Prefill) -> None:
    """Writes all of it or nothing: to a file beside `path`, which is renamed at the end.

    Prints one line where it cannot be written: the prefill itself is not lost by that. About as many bytes as the
    caches.
    """
    arrays = {f"{i}.{name}": x for i, cache in enumerate(prefill.caches) for name, x in _fields(cache).items()}
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            np.savez(file, logits=np.asarray(prefill.logits), seconds=np.float64(prefill.seconds), **arrays)
        temporary.replace(path)
    except OSError as error:
        print(f"{path}: not kept: {error}", file=sys.stderr)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: Path, model: Llama, capacity: int, dtype: str) -> Prefill | None:
    """What `write` left there, or None; a file that cannot be used is deleted, with one line.

    Args:
      path: the file.
      model: the model.
      capacity: as for `file_name`.
      dtype: as for `file_name`.
    """
    if not path.exists():
        return None
    config = model.config
    empty = functools.partial(
        certjax.init_cache, batch=1, kv_heads=config.num_kv_heads, head_dim=config.head_dim, capacity=capacity
    )
    like = jax.eval_shape(functools.partial(empty, dtype=dtype))
    try:
        with zipfile.ZipFile(path):  # np.load takes other files too
            pass
        with np.load(path, allow_pickle=False) as file:
            logits = _array(file, "logits", (1, config.vocab_size), np.float32)
            seconds = float(_array(file, "seconds", (), np.float64))
            caches = tuple(
                dataclasses.replace(
                    like,
                    **{
                        n: jax.numpy.asarray(_array(file, f"{i}.{n}", x.shape, x.dtype))
                        for n, x in _fields(like).items()
                    },
                )
                for i in range(config.num_layers)
            )
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        print(f"{path}: cannot be used, made again: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    logits, caches = model.beside_weights((jax.numpy.asarray(logits), caches))
    return Prefill(logits, caches, seconds)


def _fields(cache: "certjax.KVCache") -> dict[str, Any]:
    """The arrays of a cache by name."""
    return {f.name: getattr(cache, f.name) for f in dataclasses.fields(cache) if not f.metadata.get("static")}


def _array(file: Any, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    x = file[name]  # the zip file's checksum is compared on the way
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name} is {x.dtype} {x.shape}, expected {np.dtype(dtype).name} {shape}")
    return x
