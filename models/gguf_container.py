"""The GGUF container: metadata and quantised tensors, read with every length checked against the file.

The `gguf` package supplies the block formats and their dequantisation. Its own reader trusts the lengths in the
header, so that a damaged file can make it loop or allocate without end.
Source: the GGUF specification of the ggml project, versions 2 and 3.
"""

import dataclasses
import functools
import math
import struct
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from numpy.typing import DTypeLike

from certjax.models.source import cast

MAGIC = b"GGUF"
_SCALARS = dict(enumerate(["<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?"])) | {10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_SLAB = 1 << 22  # elements dequantised at a time: 16 MiB of float32


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is in row-major order (GGUF itself lists the fastest axis first)."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file.

    Attributes:
      path: the file.
      metadata: keys to Python scalars, strings and lists.
      tensors: names to places.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def read(self, name: str, dtype: DTypeLike = np.float32) -> np.ndarray:
        """Dequantises one tensor into `dtype`, a slab of rows at a time.

        Read, not mapped: pages of a mapped file count as memory of the process as long as it is mapped.

        Raises:
          ValueError: a value does not fit `dtype`, or the file has become shorter.
        """
        tensor = self.tensors[name]
        columns = tensor.shape[-1]
        rows = math.prod(tensor.shape[:-1])
        out = np.empty((rows, columns), dtype)
        step = max(1, _SLAB // columns)
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, rows, step):
                part = out[start : start + step]
                packed = np.fromfile(file, np.uint8, len(part) * (tensor.nbytes // rows))
                if packed.size < len(part) * (tensor.nbytes // rows):
                    raise ValueError(f"{self.path}: truncated while it was read: tensor {name!r}")
                with np.errstate(all="ignore"):  # damaged scales may be inf or NaN: that is the model's, not ours
                    slab = quants.dequantize(packed.reshape(len(part), -1), tensor.type)
                part[...] = cast(name, slab, dtype)
        return out.reshape(tensor.shape)


def open_gguf(path: Path) -> GGUFFile:
    """Opens a GGUF file and checks that everything that its header promises is there.

    Raises:
      ValueError: not GGUF, an unsupported version, a damaged header, a truncated file, or a tensor in a block
        format that cannot be dequantised.
    """
    if path.stat().st_size < 24:
        raise ValueError(f"{path}: not a GGUF file: {path.stat().st_size} bytes, expected at least 24")
    data = np.memmap(path, np.uint8, mode="r")
    cursor = _Cursor(path, data)
    if cursor.take(4) != MAGIC:
        raise ValueError(f"{path}: not a GGUF file: it starts with {bytes(data[:4])!r}, expected {MAGIC!r}")
    version = cursor.scalar("<u4")
    if version not in (2, 3):
        raise ValueError(f"{path}: GGUF version {version}, expected 2 or 3 in little-endian order")
    tensor_count = cursor.count(entry_bytes=24)
    key_count = cursor.count(entry_bytes=12)
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.string()
        if key in metadata:
            cursor.fail(f"key {key!r} stands twice")
        metadata[key] = cursor.value(cursor.scalar("<u4"))
    places = [cursor.tensor() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
        cursor.fail(f"general.alignment is {alignment!r}, expected a power of two of 8 or more")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for place in places:
        end = start + place.offset + place.nbytes
        if place.name in tensors:
            cursor.fail(f"tensor {place.name!r} stands twice")
        if place.offset % alignment:
            cursor.fail(f"tensor {place.name!r} starts at {place.offset}, expected a multiple of {alignment}")
        if end > data.size:
            raise ValueError(
                f"{path}: truncated: tensor {place.name!r} ends at byte {end}, the file at {data.size}; get it again"
            )
        tensors[place.name] = dataclasses.replace(place, offset=start + place.offset)
    return GGUFFile(path, metadata, tensors)


class _Cursor:
    """Reads forward through the header and never past the end of the file."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.data, self.position = path, data, 0

    def fail(self, what: str) -> NoReturn:
        raise ValueError(f"{self.path}: damaged GGUF header near byte {self.position}: {what}; download it again")

    def take(self, size: int) -> bytes:
        if size > self.data.size - self.position:
            self.fail(f"{size} bytes expected, {self.data.size - self.position} left in the file")
        self.position += size
        return self.data[self.position - size : self.position].tobytes()

    def scalar(self, kind: str) -> Any:
        return np.frombuffer(self.take(np.dtype(kind).itemsize), kind)[0].item()

    def count(self, entry_bytes: int) -> int:
        (number,) = struct.unpack("<Q", self.take(8))
        left = self.data.size - self.position
        if number * entry_bytes > left:
            self.fail(f"{number} entries of {entry_bytes} bytes or more promised, {left} bytes left")
        return number

    def string(self) -> str:
        raw = self.take(self.count(1))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            self.fail(f"text is not UTF-8 ({error.reason})")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            self.fail(f"unknown value type {kind}")
        item = self.scalar("<u4")
        if item == _STRING:
            return [self.string() for _ in range(self.count(8))]
        if item not in _SCALARS:
            self.fail(f"array of unsupported value type {item}")
        dtype = np.dtype(_SCALARS[item])
        return np.frombuffer(self.take(self.count(dtype.itemsize) * dtype.itemsize), dtype).tolist()

    def tensor(self) -> GGUFTensor:
        name = self.string()
        rank = self.scalar("<u4")
        if not 1 <= rank <= 4:
            self.fail(f"tensor {name!r} has {rank} axes, expected 1 to 4")
        shape = tuple(self.scalar("<u8") for _ in range(rank))[::-1]
        kind = self.scalar("<u4")
        if kind not in readable_types():
            label = GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else str(kind)
            supported = ", ".join(t.name for t in readable_types().values())
            raise ValueError(
                f"{self.path}: tensor {name!r} is of type {label}, which cannot be read; supported: {supported}"
            )
        quantization = readable_types()[kind]
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        if min(shape) < 1 or shape[-1] % block:
            self.fail(f"tensor {name!r} has shape {shape}, expected positive sizes and rows of whole blocks of {block}")
        return GGUFTensor(name, shape, quantization, self.scalar("<u8"), math.prod(shape) // block * block_bytes)


@functools.cache
def readable_types() -> dict[int, GGMLQuantizationType]:
    """The block formats that the gguf package can dequantise, found by trying a block of zeros."""
    readable = {}
    for kind in GGMLQuantizationType:
        try:
            with np.errstate(all="ignore"):
                quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        readable[int(kind)] = kind
    return readable
