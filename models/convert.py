"""A downloaded model → a certjax checkpoint."""

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from certjax.models import checkpoints, selfcheck
from certjax.models.gguf import read_gguf
from certjax.models.gguf_container import MAGIC
from certjax.models.llama.config import LlamaConfig
from certjax.models.llama.params import params_from_tensors
from certjax.models.safetensors import read_safetensors
from certjax.models.source import LazyTensor, Source, read_blocks

DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ConversionSummary:
    """What `convert` did.

    Attributes:
      source: what was read.
      target: the checkpoint.
      model_type: ``model_type`` of the config.
      parameters: number of parameters, tied embeddings counted once.
      dtype: their dtype.
      fingerprint: SHA-256 of the files read.
      messages: what the user should know, a sentence each.
    """

    source: Path
    target: Path
    model_type: str
    parameters: int
    dtype: str
    fingerprint: str
    messages: tuple[str, ...]


def open_source(path: str | os.PathLike[str]) -> Source:
    """Opens a downloaded model; the content decides how, not the name.

    Args:
      path: a GGUF file, a safetensors file, the index of a sharded one, or a folder with safetensors.

    Raises:
      ValueError: nothing of that kind, damaged, or unreadable.
    """
    path = Path(path)
    with _reading(path):
        return _open(path)


def _open(path: Path) -> Source:
    accepted = "a GGUF file, a .safetensors file, a .safetensors.index.json, or a folder that holds safetensors"
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; expected {accepted}")
    if path.is_dir():
        if checkpoints.is_checkpoint(path):
            raise ValueError(f"{path}: already a certjax checkpoint; open it with certjax.models.checkpoints.load")
        if not any(path.glob("*.safetensors*")):
            ggufs = sorted(p.name for p in path.glob("*.gguf"))
            hint = f"; it holds {', '.join(ggufs)}: name one of them" if ggufs else ""
            raise ValueError(f"{path}: no safetensors in this folder; expected {accepted}{hint}")
        return read_safetensors(path)
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(MAGIC):
        return read_gguf(path)
    # A safetensors file begins with the length of its header and the header's brace.
    if path.name.endswith((".safetensors", ".safetensors.index.json")) or head[8:] == b"{":
        return read_safetensors(path)
    raise ValueError(f"{path}: not a model file known here (it starts with {head[:4]!r}); expected {accepted}")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """What the operating system refuses becomes a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{error.filename or path}: cannot be read: {error.strerror or error}") from error


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    overwrite: bool = False,
    check: str | os.PathLike[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> ConversionSummary:
    """Converts a downloaded model of the Llama family. Peak memory is about the size of the converted parameters.

    The default is float32: no source format loses anything in it, and CPUs multiply in it. bfloat16 and float16 halve
    the checkpoint and round the parameters.

    Args:
      src: as for `open_source`.
      dst: the new checkpoint's folder.
      dtype: dtype of the parameters.
      overwrite: replace a checkpoint at `dst`.
      check: a file of reference logits (`certjax.models.selfcheck`). The checkpoint is read back and must have them, or
        it is not kept; a message says how well it does.
      progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
      ValueError: the source is damaged, of an unsupported kind, or has missing, unused or wrongly shaped tensors;
        a value does not fit `dtype`; `dst` is taken or cannot be written; `check` cannot be used, or the logits differ.
        What was at `dst` is left as it was.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    target = checkpoints.check_target(dst, overwrite=overwrite)
    source = open_source(src)
    config = LlamaConfig.from_hf(source.config)
    reference = None if check is None else selfcheck.read_fingerprint(check, config)

    def during(stage: str) -> Callable[[int, int], None] | None:
        return None if progress is None else functools.partial(progress, stage)

    tensors = _read_as(source.tensors, np.dtype(dtype), during("reading tensors"))
    with _reading(Path(src)):
        params = params_from_tensors(config, tensors, np.dtype(dtype))
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    digest = _fingerprint(source.files, during("hashing MB"))
    messages = source.messages
    with checkpoints.staged(target) as unchecked:
        checkpoints.save(
            unchecked,
            params,
            source.config,
            source.tokenizer,
            source.tokenizer_config,
            digest,
            progress=during("writing MB"),
        )
        del params  # the check reads its own back from the disk
        if reference is not None:
            loaded = checkpoints.load(unchecked, progress=during("reading back MB"))
            found = selfcheck.check_logits(loaded.params, config, reference, progress=during("checking prompts"))
            error, allowed = max(found.values())
            messages += (f"logits are those of {check}: largest difference {error:.2g}, {allowed:.2g} allowed",)
    return ConversionSummary(Path(src), target, source.config["model_type"], size, dtype, digest, messages)


def _read_as(
    tensors: Mapping[str, LazyTensor], dtype: np.dtype, progress: Callable[[int, int], None] | None
) -> dict[str, LazyTensor]:
    """The same tensors, each read straight into `dtype` and told to `progress` when first read."""
    done: set[str] = set()

    def load(name: str, dtype: np.dtype) -> np.ndarray:
        array = tensors[name].load(dtype)
        done.add(name)
        if progress:
            progress(len(done), len(tensors))
        return array

    return {
        name: dataclasses.replace(tensor, dtype=dtype, load=functools.partial(load, name))
        for name, tensor in tensors.items()
    }


def _fingerprint(files: Iterable[Path], progress: Callable[[int, int], None] | None = None) -> str:
    digest = hashlib.sha256()
    files = sorted(files)
    with _reading(files[0]):
        for _, block in read_blocks(files, progress):
            digest.update(block)
    return f"sha256:{digest.hexdigest()}"
