"""Converted models on disk: parameters by Orbax, config and tokenizer as JSON files that people can read.

    <checkpoint>/manifest.json  config.json  tokenizer.json  tokenizer_config.json  params/

Other arrays (`save_arrays`) lie in a folder of the same kind, without config and tokenizer:

    <folder>/manifest.json  arrays/

This is the one file that imports Orbax. It uses the V1 API, which lives under an experimental path until Orbax 1.0.
"""

import contextlib
import ctypes
import dataclasses
import json
import logging
import os
import shutil
import sys
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from jax.typing import DTypeLike
from orbax.checkpoint import v1 as ocp

from certjax.models.progress import Progress, halves, watching
from certjax.models.source import read_blocks, read_json

FORMAT_VERSION = 1
_PARAMS, _ARRAYS, _MANIFEST = "params", "arrays", "manifest.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint.

    Attributes:
      params: nested dict of `jax.Array`.
      config: the content of a Hugging Face ``config.json``.
      tokenizer: the content of a ``tokenizer.json``, or None.
      tokenizer_config: as in `certjax.models.Source`.
      fingerprint: what `save` was given, normally a digest of the files that the parameters came from.
    """

    params: dict[str, Any]
    config: dict[str, Any]
    tokenizer: dict[str, Any] | None
    tokenizer_config: dict[str, Any]
    fingerprint: str | None


def save(
    path: str | os.PathLike[str],
    params: dict[str, Any],
    config: dict[str, Any],
    tokenizer: dict[str, Any] | None,
    tokenizer_config: dict[str, Any],
    fingerprint: str | None = None,
    *,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> None:
    """Writes a checkpoint: all of it or nothing.

    It is written to a folder beside `path`, which is renamed at the end.

    Args:
      path: the new checkpoint's folder; the folder above it must exist.
      params: nested dict of arrays; keys are strings. Arrays on one CPU device are written without a copy.
      config: JSON object.
      tokenizer: JSON object or None.
      tokenizer_config: JSON object.
      fingerprint: says where the parameters came from.
      overwrite: replace a checkpoint that is there. Anything else there is never replaced.
      progress: called now and then, from any thread, with the megabytes (10⁶ bytes) that are done and all of them; each
        is written, then read for its checksum.

    Raises:
      ValueError: `path` is taken or cannot be written, a key is not a string, or there are no parameters.
    """
    path = check_target(path, overwrite=overwrite)
    keys = {getattr(step, "key", step) for where, _ in jax.tree_util.tree_leaves_with_path(params) for step in where}
    if not keys or not all(isinstance(key, str) and key for key in keys):
        wrong = sorted(repr(key) for key in keys if not isinstance(key, str) or not key) or "nothing"
        raise ValueError(f"params: expected nested dicts with string keys and arrays, got {wrong}")
    files = {"config": config, "tokenizer": tokenizer, "tokenizer_config": tokenizer_config}
    files["manifest"] = {"format_version": FORMAT_VERSION, "fingerprint": fingerprint}
    _write(path, _PARAMS, params, files, progress)


def save_arrays(path: str | os.PathLike[str], arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    """Writes arrays and what is known of them: all of it or nothing, as `save` does.

    Args:
      path: the new folder; the folder above it must exist.
      arrays: nested dict; keys are strings.
      facts: JSON object, without "crc32".

    Raises:
      ValueError: `path` is taken or cannot be written.
    """
    _write(check_target(path), _ARRAYS, arrays, {"manifest": facts})


def read_facts(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The facts that `save_arrays` was given.

    Raises:
      ValueError: nothing of that kind is there.
    """
    facts = read_json(Path(path) / _MANIFEST)
    if facts is None or not (Path(path) / _ARRAYS).is_dir():
        raise ValueError(f"{path}: no arrays that certjax saved: {_MANIFEST} or {_ARRAYS} is missing")
    return facts


def load_arrays(path: str | os.PathLike[str], like: dict[str, Any]) -> dict[str, Any]:
    """Reads what `save_arrays` wrote.

    Args:
      path: the folder.
      like: nested dict of `jax.ShapeDtypeStruct`, what must be there.

    Returns:
      The arrays, on the first device.

    Raises:
      ValueError: nothing of that kind is there, it is damaged, or it holds arrays of other names, shapes or dtypes.
    """
    path = Path(path).absolute()
    wrong = _differences(read_facts(path).get("crc32"), _checksums(path / _ARRAYS))
    if wrong:
        raise ValueError(f"{path}: damaged, missing or changed: {', '.join(wrong[:10])}; delete it and make it again")
    with _no_database_warnings():
        stored = ocp.metadata(path / _ARRAYS).metadata
        described = lambda tree: {
            jax.tree_util.keystr(where): f"{np.dtype(x.dtype).name} {tuple(x.shape)}"
            for where, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        wrong = _differences(described(like), described(stored))
        if wrong:
            raise ValueError(f"{path}: holds other arrays than expected: {', '.join(wrong[:10])}")
        return ocp.load(path / _ARRAYS, _abstract(stored, None, None))


def _differences(expected: Any, found: dict[str, Any]) -> list[str]:
    """Names whose values differ, or that are on one side only."""
    expected = expected if isinstance(expected, dict) else {}
    return [name for name in sorted(expected.keys() | found) if expected.get(name) != found.get(name)]


def _write(
    path: Path,
    folder: str,
    arrays: dict[str, Any],
    files: dict[str, dict[str, Any] | None],
    progress: Progress | None = None,
) -> None:
    """Arrays in `folder`, and JSON files, the manifest with checksums; all in a new folder that replaces `path`."""
    with staged(path) as temporary:
        temporary.mkdir()
        arrays = jax.tree.map(np.asarray, arrays)
        written, summed = halves(progress)
        with watching(temporary / folder, sum(a.nbytes for a in jax.tree.leaves(arrays)), written):
            _save_tree(temporary / folder, arrays)
        files["manifest"] = {**(files["manifest"] or {}), "crc32": _checksums(temporary / folder, summed)}
        for name, content in files.items():
            if content is not None:
                text = json.dumps(content, indent=1, ensure_ascii=False)
                (temporary / f"{name}.json").write_text(text, encoding="utf-8")


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A name beside `path` for a checkpoint to be made; at the end it takes the place of `path` (which `check_target`
    has allowed), and it is gone after an error.

    Raises:
      ValueError: it cannot be written.
    """
    temporary = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        yield temporary
        _put(temporary, path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    sharding: Any = None,
    progress: Progress | None = None,
) -> Checkpoint:
    """Reads a checkpoint, on however many devices, whatever it was saved on.

    Args:
      path: the checkpoint's folder.
      dtype: dtype of the parameters; None keeps theirs.
      sharding: where to put them: one `jax.sharding.Sharding`, or a nested dict of them like the parameters; None
        puts them on the first device.
      progress: called with the megabytes (10⁶ bytes) that are done and all of them; each is read for its checksum, then
        for good.

    Raises:
      ValueError: no checkpoint there, it is damaged, it is of a newer format, or `sharding` does not fit.
    """
    path = Path(path).absolute()
    manifest = read_json(path / _MANIFEST)
    if manifest is None:
        raise ValueError(f"{path}: not a certjax checkpoint: {_MANIFEST} is missing; make one with certjax convert")
    version = manifest.get("format_version")
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path}: checkpoint format {version!r}, expected {FORMAT_VERSION}; upgrade certjax or convert again"
        )
    config, tokenizer_config = read_json(path / "config.json"), read_json(path / "tokenizer_config.json")
    summed, read = halves(progress)
    stated, found = manifest.get("crc32"), _checksums(path / _PARAMS, summed)
    if config is None or tokenizer_config is None or not found or found != stated:
        wrong = [f"{_PARAMS}/{name}" for name in _differences(stated, found)]
        wrong += [n for n, c in (("config.json", config), ("tokenizer_config.json", tokenizer_config)) if c is None]
        raise ValueError(
            f"{path}: damaged checkpoint, missing or changed: {', '.join(wrong[:10]) or _PARAMS}; convert again"
        )
    with _no_database_warnings():
        abstract = _abstract(ocp.metadata(path / _PARAMS).metadata, dtype, sharding)
        params = _load_params(path / _PARAMS, abstract, read)
    return Checkpoint(params, config, read_json(path / "tokenizer.json"), tokenizer_config, manifest.get("fingerprint"))


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `path` looks like a folder that `save` wrote."""
    return (Path(path) / _PARAMS).is_dir() and (Path(path) / _MANIFEST).is_file()


def check_target(path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Checks that a checkpoint can be written at `path`, before hours go into making it.

    Returns:
      The absolute path.

    Raises:
      ValueError: it cannot.
    """
    path = Path(path).absolute()
    probe = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    try:
        if not path.parent.is_dir():
            raise ValueError(f"{path}: the folder {path.parent} does not exist; make it first")
        if path.exists() and not (overwrite and is_checkpoint(path)):
            remedy = "it is not a certjax checkpoint"
            if is_checkpoint(path):
                remedy = "give overwrite=True (--overwrite on the command line) to replace it"
            raise ValueError(f"{path}: already exists; {remedy}, or choose another name")
        probe.mkdir()
        probe.rmdir()
    except OSError as error:  # names too long, folders that may not be searched
        raise ValueError(f"{path}: cannot be written: {error}") from None
    return path


def _save_tree(path: Path, arrays: dict[str, Any]) -> None:
    """One plain file per array, a few at a time: Orbax's default, one compressed database, is held in memory whole."""
    context = ocp.Context()
    context.array_options.saving.use_ocdbt = False
    context.array_options.saving.use_compression = False  # slow, and spares little of real weights
    context.memory_options.deepcopy_host_arrays = False
    context.memory_options.write_concurrent_bytes = 64 << 20
    try:
        with _no_database_warnings(), context:
            ocp.save(path, arrays)
    except RuntimeError as error:  # what TensorStore makes of a full disk
        raise OSError(str(error)) from error


def _load_params(path: Path, abstract: dict[str, Any], progress: Progress | None) -> dict[str, Any]:
    """In parts, large arrays first: Orbax holds what it reads twice for a while, and least else is held then."""
    context = ocp.Context()
    context.pytree_options.loading.partial_load = True
    leaves = traverse_util.flatten_dict(abstract)
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    params: dict[tuple[str, ...], jax.Array] = {}
    part: dict[tuple[str, ...], Any] = {}
    with context:
        for key, leaf in sorted(leaves.items(), key=lambda item: -_nbytes(item[1])):
            part[key] = leaf
            if sum(map(_nbytes, part.values())) > max(total // 16, 16 << 20) or len(params) + len(part) == len(leaves):
                params |= traverse_util.flatten_dict(ocp.load(path, traverse_util.unflatten_dict(part)))
                part.clear()
                _return_freed_memory()
                if progress:
                    progress(sum(a.nbytes for a in params.values()) // 10**6, total // 10**6)
    return traverse_util.unflatten_dict(params)


def _return_freed_memory() -> None:
    """The C library keeps what Orbax's threads have freed: up to a third of the model."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc
        trim(0)


def _nbytes(leaf: jax.ShapeDtypeStruct) -> int:
    return leaf.size * leaf.dtype.itemsize


def _put(new: Path, path: Path) -> None:
    """Renames `new` to `path`; what is there goes only once that has worked."""
    old = new.with_name(f"{new.name}.old")
    if path.exists():
        path.rename(old)
    try:
        new.rename(path)
    except OSError:
        if old.exists():
            old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _no_database_warnings() -> Iterator[None]:
    """Keeps Orbax from logging that there is no database, which is what was asked for."""
    logger = logging.getLogger("absl")

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return "Skipping merge of OCDBT" not in text and "TensorStore data files not found" not in text

    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _checksums(folder: Path, progress: Progress | None = None) -> dict[str, int]:
    """CRC-32 of every file. The array files have no checksum of their own, and Orbax is noisy about damage."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    values = dict.fromkeys(files, 0)
    for file, block in read_blocks(files, progress):
        values[file] = zlib.crc32(block, values[file])
    return {file.relative_to(folder).as_posix(): value for file, value in values.items()}


def _abstract(stored: Any, dtype: DTypeLike | None, sharding: Any) -> dict[str, Any]:
    if sharding is None:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(sharding, jax.sharding.Sharding):
        everywhere = sharding
        sharding = jax.tree.map(lambda _: everywhere, stored)
    ours, given = str(jax.tree.structure(stored)), str(jax.tree.structure(sharding))
    if ours != given:
        raise ValueError(f"sharding: expected one, or a dict like the parameters: {ours}; got {given}")

    def leaf(where: Any, meta: Any, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        try:
            place.shard_shape(meta.shape)
        except ValueError as error:
            raise ValueError(f"sharding of params{jax.tree_util.keystr(where)}: {error}") from None
        return jax.ShapeDtypeStruct(meta.shape, np.dtype(meta.dtype if dtype is None else dtype), sharding=place)

    return jax.tree_util.tree_map_with_path(leaf, stored, sharding)
