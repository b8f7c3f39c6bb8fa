"""The compiled extension: the only file that imports it and calls `jax.ffi`.

Where the extension is missing or cannot load, importing this module still works: `is_available` tells why, and calls
raise ImportError with the same words.
"""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from certjax.types import STORAGE, Certificate, Config, Hint, KVCache, Measure

MAX_GROUP = 16  # query heads of one kv head
MAX_HEAD_DIM = 512

# In the order of the handlers' operands, which a cache begins; append gives back the first, in place.
_ALIASED = (
    "key",
    "value",
    "codes",
    "code_scale",
    "code_zero",
    "residual_ratio",
    "residual_norm",
    "value_size",
    "value_norm",
    "scale_max",
    "key_norm_max",
    "length",
    "valid",
)
_PLAIN = ("channel_weight", "channel_order", "value_center")


def _runtime_version() -> tuple[int, int] | None:
    """The XLA FFI version of the installed jaxlib, from the headers that it ships; None if they cannot be read."""
    spec = importlib.util.find_spec("jaxlib")
    if spec is None or spec.origin is None:
        return None
    header = pathlib.Path(spec.origin).parent / "include/xla/ffi/api/c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    major, minor = (re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR"))
    return (int(major[1]), int(minor[1])) if major and minor else None


def _load() -> tuple[Any, str]:
    """Imports the extension and registers its handlers. Returns (module, "") or (None, reason)."""
    try:
        native = importlib.import_module("certjax._native")
    except ImportError as e:
        return None, f"the compiled extension certjax._native cannot be imported ({e}); reinstall certjax"
    built, runtime = native.build_info()["ffi_api_version"], _runtime_version()
    if runtime is not None and runtime < built:
        return None, (
            f"the compiled extension was built for XLA FFI {built[0]}.{built[1]}, the installed jaxlib has "
            f"{runtime[0]}.{runtime[1]}: upgrade jaxlib, or rebuild certjax against it"
        )
    for name, handler in native.registrations().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return native, ""


_native, _reason = _load()


def is_available() -> tuple[bool, str]:
    """Whether the extension is loaded, and if not the reason."""
    return _native is not None, _reason


def _require() -> Any:
    if _native is None:
        raise ImportError(_reason)
    return _native


def build_info() -> dict[str, Any]:
    """How the extension was built: `ffi_api_version`, `compiler`, `isa_levels` (all compiled, not all usable here)."""
    return _require().build_info()


def cpu_features() -> dict[str, bool]:
    """The CPU features that the kernels are compiled with, and whether CPU and operating system allow them."""
    return _require().cpu_features()


def thread_count() -> int:
    """Threads of the pool that the last call ran on; before the first call, the CPUs this process may use."""
    seen = _native.seen_threads() if _native is not None else 0
    if seen:
        return seen
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def task_times() -> dict[str, int]:
    """Nanoseconds that certified steps have spent since the process began, over all threads, by kind of task: prepare
    (query and window), scan (with the plan), read (candidates and values), evaluate (sums and certificate), dense.
    """
    return _require().task_times()


def isa_levels() -> tuple[str, ...]:
    """The ISA levels that this machine can run, ascending; empty without the extension."""
    return tuple(_native.isa_levels()) if _native is not None else ()


def usable_levels(
    max_leaf: int, leaf1_ecx: int, leaf7_ebx: int, leaf7_ecx: int, leaf71_eax: int, xcr0: int
) -> list[str]:
    """The levels that an x86 machine with these cpuid and xcr0 values could run: the decision alone, for tests."""
    return _require().usable_levels(max_leaf, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf71_eax, xcr0)


def resolve_isa(isa: str | None) -> str:
    """The level that a call with this argument runs on: `isa`, else `CERTJAX_ISA`, else the best one.

    Raises:
      ImportError: the extension is not loaded.
      ValueError: the level is unknown or this machine cannot run it.
    """
    _require()
    levels = isa_levels()
    asked, source = (isa, "isa") if isa is not None else (os.environ.get("CERTJAX_ISA") or None, "CERTJAX_ISA")
    if asked is None:
        return levels[-1]
    if asked not in levels:
        raise ValueError(f"{source} must be one of the levels available here, {', '.join(levels)}: got {asked!r}")
    return asked


def is_vectorised() -> bool:
    """Whether the level that calls run on uses vector instructions: the scalar one is slower than XLA."""
    return _native is not None and resolve_isa(None) != isa_levels()[0]


# Equal attributes share a compiled call whatever their types, so each has one type, given here. The numbers are the
# enums Isa and Storage of the native code.
def _isa_number(isa: str | None) -> np.int32:
    return np.int32(build_info()["isa_levels"].index(resolve_isa(isa)))


def _attributes(cache: KVCache, isa: str | None) -> dict[str, np.int32]:
    return {"storage": np.int32(list(STORAGE).index(cache.dtype)), "isa": _isa_number(isa)}


def _same_varying(*arrays: jax.Array) -> list[jax.Array]:
    """Inside `jax.shard_map` all operands of a call must vary over the same mesh axes."""
    varying = [jax.typeof(x).mat.varying for x in arrays]
    union = frozenset().union(*varying)
    return [
        jax.lax.pcast(x, tuple(sorted(union - axes)), to="varying") if axes != union else x
        for x, axes in zip(arrays, varying, strict=True)
    ]


def _arrays(cache: KVCache) -> list[jax.Array]:
    return [getattr(cache, name) for name in _ALIASED + _PLAIN]


def _check(name: str, x: jax.Array, shape: tuple[int, ...], dtype: Any) -> None:
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name} must be {jnp.dtype(dtype).name} {shape}: got {x.dtype} {x.shape}")


def _check_head_dim(cache: KVCache) -> None:
    H = cache.shape[3]
    if H % 16 or not 16 <= H <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim must be a multiple of 16 between 16 and {MAX_HEAD_DIM}: got {H}")


def _check_query(query: jax.Array, cache: KVCache) -> None:
    B, K, _, H = cache.shape
    _check_head_dim(cache)
    G = query.shape[2] if query.ndim == 4 else 0
    if not 1 <= G <= MAX_GROUP:
        raise ValueError(f"query must be [B={B}, K={K}, G, H={H}] with G from 1 to {MAX_GROUP}: got {query.shape}")
    _check("query", query, (B, K, G, H), jnp.float32)


def append(cache: KVCache, key: jax.Array, value: jax.Array, active: jax.Array, *, isa: str | None = None) -> KVCache:
    """`certjax.append` in the extension: in place, O(1) in the capacity.

    Args:
      cache: the layer's cache; the call aliases it, so donate it to the program it is in.
      key: [B, K, H] in the storage dtype (the bits, for bfloat16).
      value: likewise.
      active: bool [B], rows that take the token.
      isa: level to run on, for tests; None for `CERTJAX_ISA` or the best. Every level gives the same bits.

    Returns:
      The cache. A row that is full, whose token holds NaN or inf in any head, or whose `length` lies outside 0 … S only
      turns invalid.

    Raises:
      ImportError: the extension is not loaded.
      ValueError: a shape or dtype is wrong, or the level is not available.
    """
    B, K, _, H = cache.shape
    _check_head_dim(cache)
    storage = STORAGE[cache.dtype]
    _check("key", key, (B, K, H), storage)
    _check("value", value, (B, K, H), storage)
    _check("active", active, (B,), bool)
    attributes = _attributes(cache, isa)
    operands = _same_varying(*_arrays(cache), key, value, active)
    # The handler takes any leading axes as batch axes, so vmap may add its own to all operands.
    call = jax.ffi.ffi_call(
        "certjax_append",
        [jax.typeof(x) for x in operands[: len(_ALIASED)]],
        vmap_method="broadcast_all",
        input_output_aliases={i: i for i in range(len(_ALIASED))},
    )
    new: dict[str, Any] = dict(zip(_ALIASED, call(*operands, **attributes), strict=True))
    return dataclasses.replace(cache, **new)


def dense_decode(
    query: jax.Array, cache: KVCache, *, span: int = 0, isa: str | None = None
) -> tuple[jax.Array, jax.Array]:
    """Exact attention over the newest `span` keys of every row.

    Reads each key and value once for the G query heads of its kv head: 2·H elements a key.

    Args:
      query: float32 [B, K, G, H], multiplied by the softmax scale; G ≤ 16.
      cache: the layer's cache.
      span: W ≥ 0, 0 for all keys; static.
      isa: as in `append`.

    Returns:
      (out, log_normalizer), float32 [B, K, G, H] and [B, K, G]. Rows of length 0 give 0 and −inf; invalid rows, and
      heads whose query holds NaN or inf, give NaN.

    Raises:
      ImportError: the extension is not loaded.
      ValueError: a shape, dtype or the span is wrong, or the level is not available.
    """
    _check_query(query, cache)
    if span < 0:
        raise ValueError(f"span must be at least 0 (0 means all keys): got {span}")
    attributes = _attributes(cache, isa)
    operands = _same_varying(query, cache.key, cache.value, cache.length, cache.valid)
    call = jax.ffi.ffi_call(
        "certjax_dense_decode",
        [jax.typeof(operands[0]), jax.typeof(operands[0][..., 0])],
        vmap_method="broadcast_all",
    )
    out, log_normalizer = call(*operands, span=np.int64(span), **attributes)
    return out, log_normalizer


_MEASURES = get_args(Measure)  # in the order of the enum Measure of the native code


def certified_decode(
    query: jax.Array,
    cache: KVCache,
    words: jax.Array,
    config: Config,
    hint: Hint,
    *,
    dense: bool = False,
    dtype: Any = jnp.float32,
    isa: str | None = None,
) -> tuple[jax.Array, Certificate, Hint]:
    """`certjax.reference.decode` in the extension.

    Args:
      query: float32 [B, K, G, H], multiplied by the softmax scale; G ≤ 16.
      cache: the layer's cache.
      words: uint32 [B, K, 4] (perturbation.py).
      config: any; with bounds="full" tier 2 of the certificate is computed where tier 1 fails, 16 H² bytes a head.
      hint: fields [B, K, G].
      dense: compute every head exactly; words, epsilon, delta and hint are not looked at.
      dtype: that the output will be rounded to: what overflows it is not certified.
      isa: as in `append`.

    Returns:
      (output float32 [B, K, G, H], Certificate [B, K, G], Hint [B, K, G]). `candidates` counts the rows whose scores
      were read for the whole group.

    Raises:
      ImportError: the extension is not loaded.
      ValueError: a shape or dtype is wrong, or the level is not available.
    """
    B, K, S, _ = cache.shape
    _check_query(query, cache)
    _check("words", words, (B, K, 4), jnp.uint32)
    _check("hint.level", hint.level, query.shape[:3], jnp.float32)
    _check("hint.wait", hint.wait, query.shape[:3], jnp.int32)
    numbers = [jnp.broadcast_to(jnp.asarray(x, jnp.float32), (B,)) for x in (config.epsilon, config.delta)]
    operands = _same_varying(*_arrays(cache), query, words, *numbers, hint.level, hint.wait)
    heads = jax.typeof(operands[-1]).update(dtype=jnp.dtype(jnp.float32))
    dtypes = {"certified": bool, "exact": bool, "level": jnp.int32, "keys_read": jnp.int32, "candidates": jnp.int32}
    names = [field.name for field in dataclasses.fields(Certificate)]
    typed = [heads.update(dtype=jnp.dtype(dtypes.get(name, jnp.float32))) for name in names]
    results = [*typed, *(jax.typeof(x) for x in operands[-2:])]
    call = jax.ffi.ffi_call(
        "certjax_certified_decode", [heads.update(shape=query.shape), *results], vmap_method="broadcast_all"
    )
    output, *rest = call(
        *operands,
        measure=np.int32(_MEASURES.index(config.measure)),
        full=np.bool_(config.bounds == "full"),
        dense=np.bool_(dense),
        always_sample=np.bool_(config.always_sample),
        largest=np.float32(jnp.finfo(dtype).max),
        window=np.int64(min(config.window, S)),
        sinks=np.int64(min(config.sinks, S)),
        span=np.int64(config.attention_span or 0),
        **_attributes(cache, isa),
    )
    return output, Certificate(*rest[:-2]), Hint(*rest[-2:])


def scan(
    query: jax.Array,
    cache: KVCache,
    words: jax.Array,
    *,
    window: int = 64,
    sinks: int = 0,
    span: int = 0,
    isa: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What a certified step knows of every key before it reads one: for tests and research, on one thread.

    Args:
      query: float32 [B, K, G, H], multiplied by the softmax scale; G ≤ 16.
      cache: the layer's cache.
      words: uint32 [B, K, 4] (perturbation.py).
      window: as `Config.window`; static, as the next two.
      sinks: as `Config.sinks`.
      span: as `Config.attention_span`, 0 for all keys.
      isa: as in `append`.

    Returns:
      (upper float32 [B, K, G, S], reference float32 [B, K, G]): upper + reference is at least q·k + E for every key of
      the pool, up to the roundings of `reference` itself; upper holds float16 numbers, and −inf outside the pool.
      reference is the largest score of the window, 0 where the pool is empty. NaN for invalid rows and for those whose
      query holds NaN or inf.

    Raises:
      ImportError: the extension is not loaded.
      ValueError: a shape, dtype or number is wrong, or the level is not available.
    """
    B, K, S, _ = cache.shape
    _check_query(query, cache)
    _check("words", words, (B, K, 4), jnp.uint32)
    if min(window, sinks, span) < 0:
        raise ValueError(f"window, sinks and span must be at least 0: got {window}, {sinks}, {span}")
    operands = _same_varying(*_arrays(cache), query, words)
    heads = jax.typeof(operands[-2][..., 0])
    call = jax.ffi.ffi_call("certjax_scan", [heads.update(shape=(*heads.shape, S)), heads], vmap_method="broadcast_all")
    upper, reference = call(
        *operands,
        window=np.int64(min(window, S)),
        sinks=np.int64(min(sinks, S)),
        span=np.int64(span),
        **_attributes(cache, isa),
    )
    return upper, reference


def project(
    x: jax.Array, weights: Sequence[jax.Array], *, transposed: bool = False, isa: str | None = None
) -> tuple[jax.Array, ...]:
    """`certjax.projection.project`, which checks the arguments, in the extension: x float32 [R, I], any R; isa as in
    `append`.
    """
    operands = _same_varying(x, *weights)
    rows = jax.typeof(operands[0])
    results = [rows.update(shape=(x.shape[0], w.shape[0 if transposed else 1])) for w in weights]
    call = jax.ffi.ffi_call("certjax_project", tuple(results), vmap_method="sequential")
    return tuple(call(*operands, transposed=np.bool_(transposed), isa=_isa_number(isa)))
