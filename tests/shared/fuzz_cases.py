"""Random calls of the extension's handlers: shapes, attributes and operands, true ones and hostile ones."""

import dataclasses
import math
from typing import Any

import ml_dtypes
import numpy as np

from certjax import _ffi
from tests.shared.ffi_frames import Runtime, Slots

STORAGE = (np.uint16, np.float16, np.float32)
HUGE = 2**63 - 1
ALIASED = (
    *("key", "value", "codes", "code_scale", "code_zero", "residual_ratio", "residual_norm", "value_size"),
    *("value_norm", "scale_max", "key_norm_max", "length", "valid"),
)
_CACHE = (*ALIASED, "channel_weight", "channel_order", "value_center")
# In the order of the handlers.
OPERANDS = {
    "certjax_append": (*_CACHE, "new_key", "new_value", "active"),
    "certjax_dense_decode": ("query", "key", "value", "length", "valid"),
    "certjax_certified_decode": (*_CACHE, "query", "words", "epsilon", "delta", "hint_level", "hint_wait"),
    "certjax_scan": (*_CACHE, "query", "words"),
}
_CERTIFICATE = {
    **{"certified": bool, "exact": bool, "error_bound": np.float32, "level": np.int32, "threshold": np.float32},
    **{"keys_read": np.int32, "candidates": np.int32, "bytes_read": np.float32, "log_normalizer": np.float32},
    **{"value_scale_lower": np.float32, "sufficient": np.float32, "wait": np.int32},
}
RESULTS = {
    "certjax_append": ALIASED,
    "certjax_dense_decode": ("out", "log_normalizer"),
    "certjax_certified_decode": ("out", *_CERTIFICATE),
    "certjax_scan": ("upper", "reference"),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """Axes of a call. `lead`: what batch and vmap make of B."""

    lead: tuple[int, ...]
    K: int
    G: int
    S: int
    H: int
    storage: int

    def of(self, name: str) -> tuple[Any, tuple[int, ...]]:
        """(dtype, shape) of an operand or result."""
        K, G, S, H, P = self.K, self.G, self.S, self.H, self.S // 64
        row, head, stored = (K, S), (K, G), STORAGE[self.storage]
        tails: dict[str, tuple[Any, tuple[int, ...]]] = {
            **{name: (stored, (*row, H)) for name in ("key", "value")},
            **{name: (stored, (K, H)) for name in ("new_key", "new_value")},
            **{name: (np.uint16, row) for name in ("residual_norm", "value_size", "value_norm")},
            **{name: (np.float32, (K, H)) for name in ("channel_weight", "value_center")},
            **{name: (np.float32, ()) for name in ("epsilon", "delta")},
            **{name: (bool, ()) for name in ("valid", "active")},
            **{name: (np.float32, (*head, H)) for name in ("query", "out")},
            **{name: (dtype, head) for name, dtype in _CERTIFICATE.items()},
            "codes": (np.uint8, (K, P, 4, H // 8, 64)),
            "code_scale": (np.uint8, (K, P, H)),
            "code_zero": (np.int8, (K, P, H)),
            "residual_ratio": (np.float32, (K, P)),
            "scale_max": (np.uint8, (K, H)),
            "key_norm_max": (np.float32, (K,)),
            "channel_order": (np.int32, (K, H)),
            "length": (np.int32, ()),
            "words": (np.uint32, (K, 4)),
            "hint_level": (np.float32, head),
            "hint_wait": (np.int32, head),
            "upper": (np.float32, (*head, S)),
            "reference": (np.float32, head),
        }
        dtype, tail = tails[name]
        return dtype, (*self.lead, *tail)


def draw_shape(rng, large=False) -> Shape:
    """A shape that the handlers take, some with axes of size 0."""
    leads = ((1,), (2,), (3,), (5,), (2, 2), (1, 3, 1), (0,))
    lead = leads[rng.choice(len(leads), p=(0.2, 0.25, 0.2, 0.2, 0.06, 0.06, 0.03))]
    K = int(rng.choice((1, 2, 3, 0), p=(0.5, 0.3, 0.17, 0.03)))
    G = int(rng.choice((1, 2, 3, 4, 5, 8, 16), p=(0.25, 0.2, 0.2, 0.15, 0.1, 0.05, 0.05)))
    H = 16 * int(rng.choice((1, 2, 3, 4, 5, 8, 32), p=(0.35, 0.25, 0.1, 0.15, 0.05, 0.08, 0.02)))
    S = 64 * int(rng.choice((0, 1, 2, 3, 4, 6, 8, 12, 16), p=(0.02, 0.08, 0.15, 0.15, 0.15, 0.15, 0.15, 0.1, 0.05)))
    if large:
        lead, K, H, S = (2,), 1, 16 * int(rng.integers(1, 4)), 64 * int(rng.integers(64, 80))
    while math.prod(lead) * K * S * H > 1 << 19:
        S = S // 128 * 64
    return Shape(lead, K, G, S, H, int(rng.integers(3)))


def stored(x, storage: int):
    """As a cache keeps it; numbers beyond the dtype become its largest."""
    if storage == 1:
        return np.clip(x, -65504, 65504).astype(np.float16)
    x = np.clip(x, -3e38, 3e38).astype(np.float32)
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if storage == 0 else x


def loaded(x):
    """Stored numbers in float64."""
    return np.asarray(x.view(ml_dtypes.bfloat16) if x.dtype == np.uint16 else x, np.float64)


def rows(rng, shape, sizes):
    """Rows of numbers of one of many kinds, each leading index for itself: [..., S, H]."""
    x = rng.standard_normal(shape) + rng.choice((0, 0, 1, 5), (*shape[:-2], 1, 1)) * rng.standard_normal(
        (*shape[:-2], 1, shape[-1])
    )
    for at in np.ndindex(shape[:-2]):
        kind = rng.integers(8)
        if kind == 1:
            x[at] *= np.exp(rng.standard_normal(shape[-1]))
        elif kind == 2:
            x[at] = x[at][:1]  # all equal
        elif kind == 3:
            x[at] *= np.exp(3 * rng.standard_normal((shape[-2], 1)))
        elif kind == 4 and shape[-2]:
            x[at][rng.integers(shape[-2])] *= 100
        elif kind == 5:
            x[at] *= rng.random((shape[-2], 1)) < 0.1
    return x * rng.choice(sizes, (*shape[:-2], 1, 1))


def _bf16_up(x):
    bits = np.nextafter((x * (1 + 1e-6)).astype(np.float32), np.float32(np.inf)).view(np.uint32)
    return ((bits + 0xFFFF) >> 16).astype(np.uint16)


def draw_cache(rng, runtime: Runtime, shape: Shape) -> dict[str, np.ndarray]:
    """A full cache whose metadata is true."""
    x = {name: np.zeros(shape.of(name)[1], shape.of(name)[0]) for name in OPERANDS["certjax_append"]}
    lead, K, S, H = shape.lead, shape.K, shape.S, shape.H
    if rng.random() < 0.9:
        sizes = (1, 1, 1, 0.05, 10), (1, 1, 0.01, 100)
    else:
        sizes = (0, 1e-41, 1e-20, 1e8, 1e18, 1e38), (0, 1e-42, 1e-30, 1e15, 1e30, 1e38)
    for name, size in zip(("key", "value"), sizes, strict=True):
        x[name][:] = stored(rows(rng, (*lead, K, S, H), size), shape.storage)
    if rng.random() < 0.7:
        x["channel_weight"][:] = np.exp(rng.standard_normal((*lead, K, H)))
        x["channel_order"][:] = rng.permuted(np.broadcast_to(np.arange(H), (*lead, K, H)), axis=-1)
        center = loaded(x["value"]).mean(-2) if S else np.zeros((*lead, K, H))
        x["value_center"][:] = np.clip(center * rng.choice((1, 1, 0, -30)), -1e38, 1e38)
    else:
        x["channel_weight"][:] = 1
        x["channel_order"][:] = np.arange(H)
    encode(runtime, shape, x)
    return x


def encode(runtime: Runtime, shape: Shape, x: dict[str, np.ndarray]) -> None:
    """Makes the metadata of all keys and values true, and the rows full. The handler codes a block when its last token
    is appended.
    """
    x["valid"][:] = x["active"][:] = True
    attributes = {"storage": np.int32(shape.storage), "isa": np.int32(-1)}
    x["scale_max"][:] = x["key_norm_max"][:] = 0
    for block in range(shape.S // 64):
        x["length"][:] = 64 * block + 63
        for new, of in (("new_key", "key"), ("new_value", "value")):
            x[new][:] = x[of][..., 64 * block + 63, :]
        operands = [x[name] for name in OPERANDS["certjax_append"]]
        error = runtime.call("certjax_append", operands, operands[:13], attributes)
        assert error == "", error
    with np.errstate(over="ignore"):
        value = loaded(x["value"])
        x["value_size"][:] = _bf16_up(np.linalg.norm(value - x["value_center"][..., None, :], axis=-1))
        x["value_norm"][:] = _bf16_up(np.linalg.norm(value, axis=-1))
        largest = np.linalg.norm(loaded(x["key"]), axis=-1).max(-1, initial=0)
        x["key_norm_max"][:] = np.maximum(x["key_norm_max"], (largest * (1 + 1e-6)).astype(np.float32))


def draw_step(rng, shape: Shape, cache: dict[str, np.ndarray], sane: bool) -> dict[str, np.ndarray]:
    """The operands of any handler over this cache: lengths, query, token, random words, promise, hints.

    `sane`: ε and δ are what Config allows, and δ so small that no certified head may ever be wrong.
    """
    x = dict(cache)
    lead, S = shape.lead, shape.S
    x["length"] = rng.integers(0, S + 1, lead, np.int32)
    full = rng.random(lead) < 0.5
    x["length"][full] = S - rng.integers(0, min(S, 70) + 1, int(full.sum()))
    ends = (rng.random(lead) < 0.15) & (S > 0)  # an append completes a block
    x["length"][ends] = 64 * rng.integers(1, max(S // 64, 1) + 1, int(ends.sum())) - 1
    odd = rng.random(lead) < 0.06
    x["length"][odd] = rng.choice((-(2**31), -1, S + 1, 2**31 - 1, 0), int(odd.sum()))
    x["valid"] = rng.random(lead) > 0.04
    x["active"] = rng.random(lead) > 0.1
    for name in ("query", "new_key", "new_value"):
        dtype, dims = shape.of(name)
        at = (*lead, *([1] * (len(dims) - len(lead))))
        new = rng.standard_normal(dims) * rng.choice((1, 1, 1, 0.3, 3, 10, 0, 1e-30, 1e4, 1e20, 3e38), at)
        new /= np.sqrt(shape.H) if name == "query" else 1
        new = np.clip(new, -3e38, 3e38)
        new = new.astype(np.float32) if name == "query" else stored(new, shape.storage)
        if new.size and rng.random() < 0.08:
            special = np.array([np.nan, np.inf, -np.inf])
            special = special.astype(ml_dtypes.bfloat16).view(dtype) if dtype == np.uint16 else special.astype(dtype)
            new.reshape(-1)[rng.integers(new.size)] = rng.choice(special)
        x[name] = new
    x["words"] = rng.integers(0, 2**32, shape.of("words")[1], np.uint32)
    x["epsilon"] = rng.choice((0.1, 0.2, 0.3, 0.5, 0.8, 0.95, 0.01), lead).astype(np.float32)
    x["delta"] = (10.0 ** -rng.uniform(7, 12, lead)).astype(np.float32)
    if not sane:
        odd = (np.nan, 0, -0.1, np.inf, -np.inf, 1e-30, 1e30, 1, 2, -0.0)
        x["epsilon"] = np.where(rng.random(lead) < 0.6, rng.choice(odd, lead), x["epsilon"]).astype(np.float32)
        x["delta"] = np.where(rng.random(lead) < 0.6, rng.choice(odd, lead), x["delta"]).astype(np.float32)
    heads = shape.of("hint_wait")[1]
    odd = (-1, 0, 2.4, 5, 1e9, 3e38, -3e38, np.nan, np.inf, -np.inf)
    x["hint_level"] = np.where(rng.random(heads) < 0.6, -1, rng.choice(odd, heads)).astype(np.float32)
    waits = rng.choice((-(2**31), -1, 1, 5, 2**31 - 1), heads)
    x["hint_wait"] = np.where(rng.random(heads) < 0.97, 0, waits).astype(np.int32)
    return x


ATTRIBUTES = {
    "certjax_append": ("storage", "isa"),
    "certjax_dense_decode": ("span", "storage", "isa"),
    "certjax_scan": ("window", "sinks", "span", "storage", "isa"),
    "certjax_certified_decode": (
        *("measure", "full", "dense", "always_sample", "largest", "window", "sinks", "span", "storage", "isa"),
    ),
}


def draw_attributes(rng, storage: int) -> dict[str, np.generic]:
    """Of any handler, in range."""
    return {
        "measure": np.int32(rng.integers(3)),
        "full": np.bool_(rng.random() < 0.4),
        "dense": np.bool_(rng.random() < 0.07),
        "always_sample": np.bool_(rng.random() < 0.8),
        "largest": np.float32(rng.choice((np.finfo(np.float32).max, 65504))),
        "window": np.int64(rng.choice((0, 1, 16, 64, 100, 700, HUGE), p=(0.2, 0.1, 0.1, 0.4, 0.1, 0.05, 0.05))),
        "sinks": np.int64(rng.choice((0, 1, 4, 64, 100, HUGE), p=(0.6, 0.1, 0.1, 0.1, 0.06, 0.04))),
        "span": np.int64(rng.choice((0, 1, 65, 200, 300, HUGE), p=(0.6, 0.05, 0.05, 0.1, 0.1, 0.1))),
        "storage": np.int32(storage),
        "isa": np.int32(rng.choice((-1, *map(_ffi.build_info()["isa_levels"].index, _ffi.isa_levels())))),
    }


def corrupt(rng, x: dict[str, np.ndarray], names) -> None:
    """Replaces some of these operands by anything."""
    for name in names:
        if (name == "query" and rng.random() < 0.9) or rng.random() < 0.6:
            continue
        old = x[name]
        data = rng.integers(0, 256, old.nbytes, np.uint8)
        kind = rng.integers(5)
        if kind == 0:
            data[:] = rng.choice((0, 255, 0x7F, 0x80))
        elif kind < 3 and old.dtype.kind == "f":
            special = (np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-44, 0, -0.0, -1, 1)
            with np.errstate(over="ignore"):
                data = rng.choice(special, old.size).astype(old.dtype).view(np.uint8)
        elif kind < 3 and old.dtype == np.uint16:  # bits of bfloat16
            data = rng.choice((0x7FC0, 0x7F80, 0xFF80, 0x7F7F, 0xFF7F, 1, 0, 0x8000, 0xBF80), old.size)
            data = data.astype(np.uint16).view(np.uint8)
        elif kind < 3 and old.dtype == np.int32:
            data = rng.choice((-(2**31), -1, 0, 1, 15, 64, 10**6, 2**31 - 1), old.size).astype(np.int32).view(np.uint8)
        new = data.view(old.dtype).reshape(old.shape)
        if name == "length":  # most rows must stay usable, or nothing happens
            keep = rng.random(old.shape) < 0.7
        else:
            keep = rng.random(old.shape[: rng.integers(old.ndim + 1)]) < rng.choice((0, 0.5, 0.95))
        keep = keep.reshape(*keep.shape, *([1] * (old.ndim - keep.ndim)))
        if old.dtype == bool:  # bytes other than 0 and 1 must survive
            mixed = np.where(keep, old.view(np.uint8), new.view(np.uint8)).view(bool)
        else:
            mixed = np.where(keep, old, new)
        x[name] = mixed.reshape(old.shape)


FILL = 0xA5  # of results that were not written


def run(rng, runtime: Runtime, slots: Slots, handler: str, shape: Shape, x: dict, attributes: dict):
    """(error, operands after the call, results) with everything between guard pages."""
    slots.reset()
    operands = {}
    for name in OPERANDS[handler]:
        operands[name] = slots.take(x[name].dtype, x[name].shape, at_end=bool(rng.integers(2)))
        operands[name].view(np.uint8)[...] = x[name].view(np.uint8)
    if handler == "certjax_append":
        results = {name: operands[name] for name in RESULTS[handler]}
    else:
        results = {name: slots.take(*shape.of(name), at_end=bool(rng.integers(2))) for name in RESULTS[handler]}
        for result in results.values():
            result.view(np.uint8)[...] = FILL
    mine = {name: attributes[name] for name in ATTRIBUTES[handler]}
    error = runtime.call(handler, list(operands.values()), list(results.values()), mine)
    return error, operands, results
