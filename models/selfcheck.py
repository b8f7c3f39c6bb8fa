"""Golden self-test: a converted model against what a reference implementation computed with the same weights.

A fingerprint is an .npz file, or a JSON object of nested lists, that holds any of these arrays (B prompts of T tokens,
V tokens in the vocabulary; j = 0, 1, … numbers prompts of different lengths):

    input_ids [B, T], logits [B, T, V]                          at positions 0 … T − 1
    input_ids, positions [B, T], logits_at_positions [B, T, V]  at any other positions, far apart
    ids_j [T], top_ids_j [W], top_logits_j [W]                  the W largest logits after the last token
    ids_j [T], nll_j [T − 1]                                    −ln p of each token but the first, nats
    ids_j [T], greedy_ids_j [T + n]                             ids_j, then n tokens that were the most likely ones

Contiguous positions of a short prompt cannot show a wrong rotary embedding: Llama 3.1 without its frequency scaling has
the same logits there. Far-apart ones do.
"""

import dataclasses
import functools
import json
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from certjax.models.llama.config import LlamaConfig
from certjax.models.llama.params import Params, load_model

# Allowed difference as a share of the largest reference logit, by the dtype of the parameters.
TOLERANCES = {"float32": 5e-5, "float16": 1e-2, "bfloat16": 1e-1}
_ACCEPTED = "input_ids with logits, or with positions and logits_at_positions, or ids_0 with top_ids_0 and top_logits_0"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the reference answered.

    Attributes:
      name: of the array in the file.
      tokens: int [M], the tokens of the prompt after which it was asked.
      expected: float32 [M, …].
      of: from the model's logits [T, V] to the same.
    """

    name: str
    tokens: np.ndarray
    expected: np.ndarray
    of: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens int32 [T], their positions int32 [T], and the answers to them; the name is for messages."""

    name: str
    ids: np.ndarray
    positions: np.ndarray
    answers: tuple[Answer, ...]


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """The prompts of one file, and the largest absolute value of its logits."""

    path: Path
    prompts: tuple[Prompt, ...]
    scale: float


def read_fingerprint(path: str | os.PathLike[str], config: LlamaConfig) -> Fingerprint:
    """Reads a fingerprint and checks that it can be of this model.

    Args:
      path: an .npz or JSON file, as described above.
      config: the model.

    Raises:
      ValueError: the file cannot be read, has no logits, has an array that is not known here, or one that does not fit
        the model or the others.
    """
    path = Path(path)
    arrays = _Arrays(path, config, _read(path))
    prompts = (*_batches(arrays), *_numbered(arrays))
    scale = max(
        (float(np.abs(a.expected).max()) for p in prompts for a in p.answers if "logits" in a.name), default=0.0
    )
    if arrays.left:
        raise ValueError(f"{path}: arrays not known here or without their partners: {', '.join(sorted(arrays.left))}")
    if not scale:
        raise ValueError(f"{path}: no logits to compare; expected {_ACCEPTED}")
    return Fingerprint(path, prompts, scale)


def check_logits(
    params: Params,
    config: LlamaConfig,
    fingerprint: Fingerprint,
    tolerance: float | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, tuple[float, float]]:
    """Computes the logits of a fingerprint's prompts and compares.

    The rotary angles are those of `RopeConfig(angles="reference")` whatever `config` says: far-apart reference logits
    contain the reference implementation's own float32 rounding of position × frequency. Embeddings that depend on the
    context get each prompt's own, as in the reference.

    Args:
      params: nested dict as `load_model` takes it.
      config: the model.
      fingerprint: from `read_fingerprint` with the same config.
      tolerance: largest allowed difference. Default: a share of the largest reference logit. 5e-5 for float32
        parameters, which differ by the order of sums alone; 1e-2 for float16 and 1e-1 for bfloat16, which were rounded.
      progress: called with (prompts done, all prompts).

    Returns:
      For every array of the file its largest difference and what was allowed.

    Raises:
      ValueError: a difference is larger, or not a number; the message has the largest one of every array, and where.

    Memory: beside the parameters the scores of a layer, N·T² floats, and the logits, T·V floats, one prompt at a time.
    """
    dtype = jax.tree.leaves(params)[0].dtype.name
    allowed = TOLERANCES[dtype] * fingerprint.scale if tolerance is None else tolerance
    largest: dict[str, float] = {}
    where: dict[str, str] = {}
    apart = set()
    if progress:
        progress(0, len(fingerprint.prompts))
    for done, prompt in enumerate(fingerprint.prompts):
        logits = _logits(params, config, prompt)
        for answer in prompt.answers:
            got = answer.of(logits)
            error = np.nan_to_num(np.abs(got - answer.expected), nan=np.inf)
            if error.max() >= largest.get(answer.name, 0.0):
                largest[answer.name] = float(error.max())
                where[answer.name] = _where(prompt, answer, got, np.unravel_index(error.argmax(), error.shape))
            if (prompt.positions != np.arange(prompt.ids.size)).any():
                apart.add(answer.name)
        if progress:
            progress(done + 1, len(fingerprint.prompts))
    wrong = [name for name, error in largest.items() if not error <= allowed]
    if wrong:
        text = [f"{name} differs by up to {largest[name]:.3g}, {where[name]}" for name in wrong]
        text += [f"{name} agrees within {error:.3g}" for name, error in largest.items() if name not in wrong]
        if apart.issuperset(wrong) and not apart.issuperset(largest):
            text.append("contiguous positions are right, so suspect the rotary embedding in the config")
        raise ValueError(
            f"{fingerprint.path}: the model does not have the reference's logits ({allowed:.3g} allowed for {dtype} "
            f"parameters, reference logits up to {fingerprint.scale:.3g}): {'; '.join(text)}"
        )
    return {name: (error, allowed) for name, error in largest.items()}


def _logits(params: Params, config: LlamaConfig, prompt: Prompt) -> np.ndarray:
    """Float32 [T, V]."""
    if config.rope.context is not None:
        config = config.with_context(int(prompt.positions.max()) + 1)
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, angles="reference"))
    # Not jitted: a layer at a time needs no more memory than it has to, and nothing is compiled twice.
    model = load_model(params, config, attention="dense")
    return np.asarray(model(jnp.asarray(prompt.ids[None]), jnp.asarray(prompt.positions[None]))[0])


def _where(prompt: Prompt, answer: Answer, got: np.ndarray, index: tuple[Any, ...]) -> str:
    token = int(answer.tokens[index[0]])
    entry = f", entry {index[1]}" if len(index) > 1 else ""
    return (
        f"after token {token} of {prompt.name} (position {prompt.positions[token]}){entry}: "
        f"expected {answer.expected[index]:.6g}, got {got[index]:.6g}"
    )


def _read(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file:
            if file.read(2) == b"PK":
                file.seek(0)
                with np.load(file) as archive:
                    return {name: archive[name] for name in archive.files}
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: np.asarray(value) for name, value in content.items()}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error, RecursionError) as error:
        raise ValueError(f"{path}: not a fingerprint, neither .npz nor a JSON object of arrays: {error}") from None


class _Arrays:
    """The arrays of a file, checked as they are taken."""

    def __init__(self, path: Path, config: LlamaConfig, arrays: dict[str, np.ndarray]):
        self.path, self.config, self.arrays, self.left = path, config, arrays, set(arrays)

    def integers(self, name: str, shape: tuple[int | None, ...], below: int) -> np.ndarray:
        """Int32 in [0, below)."""
        array = self._take(name, shape, np.integer, "integers")
        if array.min() < 0 or array.max() >= below:
            raise ValueError(
                f"{self.path}: {name} must hold integers from 0 to {below - 1} for this model, "
                f"got {array.min()} to {array.max()}"
            )
        return array.astype(np.int32)

    def numbers(self, name: str, shape: tuple[int | None, ...]) -> np.ndarray:
        """Finite float32."""
        array = self._take(name, shape, np.number, "numbers").astype(np.float32)
        if not np.isfinite(array).all():
            raise ValueError(f"{self.path}: {name} must hold finite numbers")
        return array

    def _take(self, name: str, shape: tuple[int | None, ...], kind: type, noun: str) -> np.ndarray:
        array = self.arrays.get(name, np.zeros(0))
        fits = len(shape) == array.ndim and all(
            size > 0 if n is None else size == n for n, size in zip(shape, array.shape, strict=True)
        )
        if not fits or not np.issubdtype(array.dtype, kind):
            wanted = [n or "any" for n in shape]
            got = f"{array.dtype} {list(array.shape)}" if name in self.arrays else "nothing"
            raise ValueError(f"{self.path}: {name} must be an array of {noun} of shape {wanted}, got {got}")
        self.left.discard(name)
        return array


def _batches(arrays: _Arrays) -> Iterator[Prompt]:
    if not {"logits", "logits_at_positions"} & arrays.left:
        return
    config = arrays.config
    ids = arrays.integers("input_ids", (None, None), config.vocab_size)
    for name in ("logits", "logits_at_positions"):
        if name not in arrays.left:
            continue
        positions = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
        if name == "logits_at_positions":
            positions = arrays.integers("positions", ids.shape, config.max_positions)
            if any(config.windows):
                raise ValueError(
                    f"{arrays.path}: {name} of a model with sliding windows: implementations differ in whether a "
                    "window counts tokens or positions; leave them out"
                )
        expected = arrays.numbers(name, (*ids.shape, config.vocab_size))
        tokens = np.arange(ids.shape[1])
        for i, row in enumerate(ids):
            yield Prompt(f"row {i}", row, positions[i], (Answer(name, tokens, expected[i], lambda logits: logits),))


def _numbered(arrays: _Arrays) -> Iterator[Prompt]:
    vocab = arrays.config.vocab_size
    for name in sorted(name for name in arrays.left if re.fullmatch(r"ids_\d+", name)):
        ids = arrays.integers(name, (None,), vocab)
        answers = []
        if f"top_logits{name[3:]}" in arrays.left:
            top = arrays.integers(f"top_{name}", (None,), vocab)
            expected = arrays.numbers(f"top_logits{name[3:]}", top.shape)
            last = np.array([ids.size - 1])
            answers.append(Answer(f"top_logits{name[3:]}", last, expected[None], functools.partial(_last, top)))
            # No other token is above them.
            smallest = np.sort(expected)[:1]
            answers.append(Answer(f"top_{name}", last, smallest, functools.partial(_nth_largest, top.size)))
        if f"nll{name[3:]}" in arrays.left:
            expected = arrays.numbers(f"nll{name[3:]}", (ids.size - 1,))
            answers.append(Answer(f"nll{name[3:]}", np.arange(ids.size - 1), expected, functools.partial(_nll, ids)))
        yield _contiguous(name, ids, answers)
        if f"greedy_{name}" in arrays.left:
            longer = arrays.integers(f"greedy_{name}", (None,), vocab)
            if not np.array_equal(longer[: ids.size], ids) or longer.size == ids.size:
                raise ValueError(f"{arrays.path}: greedy_{name} must begin with {name} and go on")
            after = np.arange(ids.size - 1, longer.size - 1)
            short = functools.partial(_short_of_the_largest, after, longer[ids.size :])
            zero = np.zeros(after.size, np.float32)
            yield _contiguous(f"greedy_{name}", longer[:-1], [Answer(f"greedy_{name}", after, zero, short)])


def _contiguous(name: str, ids: np.ndarray, answers: list[Answer]) -> Prompt:
    return Prompt(name, ids, np.arange(ids.size, dtype=np.int32), tuple(answers))


def _last(entries: np.ndarray, logits: np.ndarray) -> np.ndarray:
    return logits[-1:, entries]


def _nth_largest(n: int, logits: np.ndarray) -> np.ndarray:
    return np.sort(logits[-1])[-n:][:1]


def _nll(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """−ln p of ids[1:], float64 [T − 1]; a token at a time, for logits are large."""
    return np.array([_log_sum_exp(row.astype(np.float64)) - row[i] for row, i in zip(logits, ids[1:], strict=False)])


def _log_sum_exp(row: np.ndarray) -> float:
    return row.max() + np.log(np.exp(row - row.max()).sum())


def _short_of_the_largest(after: np.ndarray, chosen: np.ndarray, logits: np.ndarray) -> np.ndarray:
    """By how much the logits of the chosen tokens miss the largest ones."""
    return logits[after].max(-1) - logits[after, chosen]
