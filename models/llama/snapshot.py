"""What a prefill left, to be used many times and kept on disk: a context is read once and asked many questions."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.models import checkpoints
from certjax.models.llama.modeling import Caches, Llama
from certjax.models.llama.prefill import prefill

# Raise it when a field of KVCache, or what a prefill writes to it, changes its meaning.
FORMAT_VERSION = 1


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Prompts that a model has read.

    Attributes:
      prompts: token ids of the B rows.
      logits: float32 [B, V] after the last token of each row.
      caches: one `KVCache` a layer; never donate them, `resume` copies.
      identity: what the caches depend on besides the prompts: `format_version`, `config` (of the model), `weights`
        (a checksum).
      seconds: that reading took.
      weights: the model's arrays themselves.
    """

    prompts: tuple[tuple[int, ...], ...]
    logits: jax.Array
    caches: Caches
    identity: dict[str, Any]
    seconds: float
    weights: list[jax.Array] = dataclasses.field(repr=False)

    @classmethod
    def take(
        cls,
        model: Llama,
        prompts: Sequence[Sequence[int]],
        *,
        capacity: int,
        cache_dtype: Any = jnp.float32,
        chunk: int = 512,
        progress: Callable[[int, int], None] | None = None,
    ) -> "Snapshot":
        """Reads prompts.

        Args:
          model: the model.
          prompts: B sequences of token ids.
          capacity: S, tokens that a row can hold: prompt, questions and answers.
          cache_dtype: float32, bfloat16 or float16.
          chunk: as for `prefill`.
          progress: as for `prefill`.

        Raises:
          ValueError: as for `prefill`.
        """
        start = time.monotonic()
        caches = model.init_caches(len(prompts), capacity, cache_dtype)
        logits, caches = prefill(model, prompts, caches, chunk=chunk, progress=progress)
        logits.block_until_ready()
        rows = tuple(tuple(int(i) for i in row) for row in prompts)
        seconds = time.monotonic() - start
        return cls(rows, logits, caches, _identity(model), seconds, jax.tree.leaves(model))

    def resume(self, model: Llama, more: Sequence[Sequence[int]] | None = None) -> tuple[jax.Array, Caches]:
        """Logits and caches for `decode`, copied: the snapshot stays as it is.

        Args:
          model: the model that read the prompts, whatever its attention.
          more: B sequences of token ids that follow the prompts, such as a question; None for nothing.

        Raises:
          ValueError: another model, or as for `prefill`.

        Memory: once the caches.
        """
        same = [id(x) for x in self.weights] == [id(x) for x in jax.tree.leaves(model)]
        weights = self.identity["weights"] if same else None  # no need to read them all for every question
        _compare("the snapshot", self.identity, _identity(model, weights))
        caches = jax.tree.map(jnp.copy, self.caches)
        return (self.logits, caches) if more is None else prefill(model, more, caches)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a new folder: all of it or nothing. About the bytes of the caches, whatever they are filled to.

        Raises:
          ValueError: `path` is taken or cannot be written.
        """
        facts = self.identity | {
            "prompts": self.prompts,
            "capacity": self.caches[0].capacity,
            "cache_dtype": self.caches[0].dtype,
            "seconds": self.seconds,
        }
        checkpoints.save_arrays(path, _arrays(self.logits, self.caches), facts)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], model: Llama, prompts: Sequence[Sequence[int]] | None = None
    ) -> "Snapshot":
        """Reads what `save` wrote.

        Args:
          path: the folder.
          model: the model that read the prompts, whatever its attention.
          prompts: what the snapshot must be of; None where any will do.

        Raises:
          ValueError: no snapshot there, it is damaged, or it is of another model, other weights or other prompts; the
            message says which and where they differ.
        """
        facts = checkpoints.read_facts(path)
        identity = {name: facts.get(name) for name in ("format_version", "config", "weights")}
        _compare(f"{path}", identity, _identity(model))
        config = model.config
        try:
            rows = tuple(tuple(int(i) for i in row) for row in facts["prompts"])
            one = functools.partial(
                certjax.init_cache, batch=len(rows), kv_heads=config.num_kv_heads, head_dim=config.head_dim
            )
            cache = jax.eval_shape(functools.partial(one, capacity=facts["capacity"], dtype=facts["cache_dtype"]))
            seconds = float(facts["seconds"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a whole snapshot: {error!r}; delete it and make it again") from None
        if prompts is not None:
            _compare_prompts(path, rows, prompts)
        logits = jax.ShapeDtypeStruct((len(rows), config.vocab_size), jnp.float32)
        arrays = checkpoints.load_arrays(path, _arrays(logits, (cache,) * config.num_layers))
        caches = tuple(dataclasses.replace(cache, **arrays[f"layer_{i}"]) for i in range(config.num_layers))
        logits, caches = model.beside_weights((arrays["logits"], caches))
        return cls(rows, logits, caches, identity, seconds, jax.tree.leaves(model))


def snapshot_name(model: Llama, prompts: Sequence[Sequence[int]], capacity: int, cache_dtype: str) -> str:
    """A name for a folder that differs wherever the snapshot would: model, weights, prompts, caches."""
    rows = [[int(i) for i in row] for row in prompts]
    parts = json.dumps([_identity(model), rows, capacity, cache_dtype])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def _identity(model: Llama, weights: int | None = None) -> dict[str, Any]:
    """JSON: what the caches depend on besides the prompts; `weights` is the checksum where it is known."""
    config = json.loads(json.dumps(dataclasses.asdict(model.config)))
    weights = _checksum(model) if weights is None else weights
    return {"format_version": FORMAT_VERSION, "config": config, "weights": weights}


def _checksum(model: Llama) -> int:
    """CRC-32 of all weights, which are read once, at some GB a second."""
    checksum = 0
    for where, x in jax.tree_util.tree_leaves_with_path(model):
        host = np.ascontiguousarray(x)
        checksum = zlib.crc32(f"{jax.tree_util.keystr(where)} {host.dtype.name} {host.shape}".encode(), checksum)
        checksum = zlib.crc32(host.reshape(-1).view(np.uint8).data, checksum)
    return checksum


def _compare(what: str, stored: dict[str, Any], expected: dict[str, Any]) -> None:
    if stored["format_version"] != expected["format_version"]:
        raise ValueError(
            f"{what} has format {stored['format_version']!r}, expected {expected['format_version']}; make it again"
        )
    theirs, ours = _flat(stored["config"]), _flat(expected["config"])
    wrong = [f"{n}: {theirs.get(n)!r}, not {ours.get(n)!r}" for n in sorted(theirs.keys() | ours) if
             theirs.get(n) != ours.get(n)]  # fmt: skip
    if wrong:
        raise ValueError(f"{what} is of a model with another config ({'; '.join(wrong[:5])}); use that model")
    if stored["weights"] != expected["weights"]:
        raise ValueError(f"{what} is of a model with other weights; use that model, or make it again")


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted names to values."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    parts = [_flat(value, f"{prefix}.{name}" if prefix else name) for name, value in tree.items()]
    return {name: value for part in parts for name, value in part.items()}


def _compare_prompts(
    path: str | os.PathLike[str], stored: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]]
) -> None:
    if len(stored) != len(prompts):
        raise ValueError(f"{path} is of {len(stored)} prompts, expected {len(prompts)}")
    for b, (theirs, ours) in enumerate(zip(stored, prompts, strict=True)):
        for i, (a, c) in enumerate(itertools.zip_longest(theirs, ours)):
            if a != c:
                raise ValueError(
                    f"{path} is of another text: prompts[{b}] has {len(theirs)} tokens there and {len(ours)} here, and "
                    f"they differ from token {i} on"
                )


def _arrays(logits: Any, caches: Any) -> dict[str, Any]:
    """Logits and caches as nested dicts."""
    arrays = {"logits": logits}
    for i, cache in enumerate(caches):
        fields = [f.name for f in dataclasses.fields(cache) if not f.metadata.get("static")]
        arrays[f"layer_{i}"] = {name: getattr(cache, name) for name in fields}
    return arrays
