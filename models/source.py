"""What every reader of a downloaded model returns: its config, tensors and tokenizer, in Hugging Face terms."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class LazyTensor:
    """A tensor still on disk. `np.asarray(tensor, dtype)` reads it, and keeps nothing.

    Attributes:
      name: name for messages.
      shape: as in the Hugging Face checkpoint (linear layers are [out, in]).
      dtype: dtype that a read without a wish for one returns.
      load: reads the tensor in a given dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[np.dtype], np.ndarray]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(f"tensor {self.name!r} is on disk and cannot be viewed without a copy")
        return self.load(np.dtype(self.dtype if dtype is None else dtype))


@dataclasses.dataclass(frozen=True)
class Source:
    """A downloaded model, whatever its file format.

    Attributes:
      config: the content of a Hugging Face ``config.json``.
      tensors: Hugging Face tensor names to tensors, read one by one when asked for.
      tokenizer: the content of a ``tokenizer.json``, or None.
      tokenizer_config: ``bos_token_id`` (int or None), ``eos_token_id`` (list of int), ``add_bos_token`` (bool),
        ``eos_token`` (str or None: the one that a chat template prints), ``chat_template`` (str or None).
      files: the files that hold the tensors.
      messages: what the user should know, a sentence each (a tokenizer that could not be read, say).
    """

    config: dict[str, Any]
    tensors: Mapping[str, LazyTensor]
    tokenizer: dict[str, Any] | None
    tokenizer_config: dict[str, Any]
    files: tuple[Path, ...]
    messages: tuple[str, ...] = ()


def cast(name: str, array: np.ndarray, dtype: DTypeLike) -> np.ndarray:
    """Returns `array` in `dtype`, without a copy where it has that dtype already.

    Raises:
      ValueError: a finite value becomes infinite (float16 ends at 65504).
    """
    try:
        with np.errstate(over="raise"):
            return array.astype(dtype, copy=False)
    except FloatingPointError:
        largest = float(np.nanmax(np.abs(array)))
        raise ValueError(
            f"tensor {name!r} holds values up to {largest:.3g}, too large for {np.dtype(dtype).name}; "
            "convert to 'float32' or 'bfloat16'"
        ) from None


def read_blocks(
    files: Iterable[Path], progress: Callable[[int, int], None] | None = None
) -> Iterator[tuple[Path, bytes]]:
    """Yields the files' content a megabyte at a time; tells `progress` the megabytes (10⁶ bytes) read, and all."""
    files = list(files)
    done, total = 0, sum(file.stat().st_size for file in files)
    for file in files:
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                yield file, block
                done += len(block)
                if progress:
                    progress(done // 10**6, total // 10**6)


def read_json(path: Path) -> dict[str, Any] | None:
    """Reads a JSON object; None where there is no file.

    Raises:
      ValueError: the file is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError, OSError) as error:
        raise ValueError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a JSON {type(content).__name__}, expected an object")
    return content
