"""The KV cache of one layer: make, prefill, append. Pure functions; donate the cache to update it in place."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from certjax import _ffi
from certjax._dispatch import dispatch
from certjax.quantization import encode_blocks, norm_up, to_bf16_bits_up
from certjax.types import BLOCK, LANES, STORAGE, KVCache


def init_cache(*, batch: int, kv_heads: int, head_dim: int, capacity: int, dtype=jnp.bfloat16) -> KVCache:
    """Makes an empty cache for one layer.

    Args:
      batch: B, rows.
      kv_heads: K; grouped query heads share a kv head and are never repeated.
      head_dim: H, a multiple of 16, at most 512.
      capacity: S, tokens a row can hold; rounded up to a multiple of 64.
      dtype: of keys and values: bfloat16, float16 or float32.

    Returns:
      A KVCache of 2·B·K·S·H elements, plus H/2 + 8 bytes of metadata a key and 2 H bytes for every 64 keys.

    Raises:
      ValueError: a size or dtype that is not supported.
    """
    for name, x in (("batch", batch), ("kv_heads", kv_heads), ("capacity", capacity)):
        if not isinstance(x, int) or x < (0 if name == "batch" else 1):
            raise ValueError(f"{name} must be a positive integer: got {x!r}")
    if not isinstance(head_dim, int) or head_dim % 16 or not 16 <= head_dim <= 512:
        raise ValueError(f"head_dim must be a multiple of 16 between 16 and 512: got {head_dim!r}; pad keys and values")
    name = jnp.dtype(dtype).name
    if name not in STORAGE:
        raise ValueError(f"dtype must be one of {', '.join(STORAGE)}: got {name}")
    B, K, H, blocks = batch, kv_heads, head_dim, -(-capacity // BLOCK)
    S = blocks * BLOCK
    return KVCache(
        key=jnp.zeros((B, K, S, H), STORAGE[name]),
        value=jnp.zeros((B, K, S, H), STORAGE[name]),
        codes=jnp.zeros((B, K, blocks, BLOCK // LANES, H // 8, 4 * LANES), jnp.uint8),
        code_scale=jnp.zeros((B, K, blocks, H), jnp.uint8),
        code_zero=jnp.zeros((B, K, blocks, H), jnp.int8),
        residual_ratio=jnp.zeros((B, K, blocks), jnp.float32),
        residual_norm=jnp.zeros((B, K, S), jnp.uint16),
        value_size=jnp.zeros((B, K, S), jnp.uint16),
        value_norm=jnp.zeros((B, K, S), jnp.uint16),
        scale_max=jnp.zeros((B, K, H), jnp.uint8),
        key_norm_max=jnp.zeros((B, K), jnp.float32),
        channel_weight=jnp.ones((B, K, H), jnp.float32),
        # A tile, not a broadcast of one buffer: every field must be donatable on its own.
        channel_order=jnp.tile(jnp.arange(H, dtype=jnp.int32), (B, K, 1)),
        value_center=jnp.zeros((B, K, H), jnp.float32),
        length=jnp.zeros((B,), jnp.int32),
        valid=jnp.ones((B,), bool),
        dtype=name,
    )


def to_storage(x: jax.Array, dtype: str) -> jax.Array:
    """Rounds x to the cache's dtype and returns what is stored: bits for bfloat16."""
    x = x.astype(dtype)
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if dtype == "bfloat16" else x


def from_storage(x: jax.Array, dtype: str) -> jax.Array:
    """The float32 values of stored keys or values."""
    if dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(x.astype(jnp.uint32) << 16, jnp.float32)
    return x.astype(jnp.float32)


def prefill(
    cache: KVCache,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array | None = None,
    query: jax.Array | None = None,
) -> KVCache:
    """Adds T tokens to every row, after what the row holds; call it again for the next chunk.

    The first call on an empty row also fixes what the row's metadata refers to: the value centre (mean of these
    values) and the weights and order of the channels. They sharpen the score bounds and are valid whatever follows.

    Args:
      cache: KVCache; donate it.
      key: [B, T, K, H] after RoPE, bfloat16, float16 or float32; rounded to the cache's dtype.
      value: [B, T, K, H], likewise.
      lengths: int32 [B], tokens of each row that are true, the first ones; None for all T.
      query: [B, T, N, H] of the same tokens, optional: N a multiple of K. Makes the score bounds tighter.

    Returns:
      The cache. A row that would overflow, or whose tokens hold NaN or inf, is unchanged but for `valid`, which is
      False from then on: its outputs are NaN and never certified.

    Raises:
      ValueError: wrong ranks, shapes or dtypes; more tokens than the capacity where that can be known (outside jit).
    """
    B, K, S, H = cache.shape
    _check_tokens(cache, key, value)
    T = key.shape[1]
    if T > S:
        raise ValueError(f"key has {T} tokens: the cache's capacity is {S}; make it larger in init_cache")
    if query is not None and (
        query.ndim != 4 or query.shape[:2] != (B, T) or query.shape[2] % K or query.shape[3] != H or not query.shape[2]
    ):
        raise ValueError(f"query must be [B={B}, T={T}, N, H={H}] with N a multiple of K={K}: got {query.shape}")
    if lengths is None:
        lengths = jnp.full((B,), T, jnp.int32)
    elif jnp.shape(lengths) != (B,) or not jnp.issubdtype(jnp.result_type(lengths), jnp.integer):
        raise ValueError(f"lengths must be integers [B={B}]: got {jnp.result_type(lengths)} {jnp.shape(lengths)}")
    lengths = jnp.asarray(lengths, jnp.int32)
    _check_room(cache, lengths, T)
    return _write(cache, key, value, lengths, query, calibrate=True)


def append(
    cache: KVCache,
    key: jax.Array,
    value: jax.Array,
    active: jax.Array | None = None,
    *,
    implementation: str | None = None,
) -> KVCache:
    """Adds one token to every active row. O(1) in the capacity, in place when the cache is donated.

    It never sets the value centre and the channel weights: a row that was not prefilled keeps 0 and 1, which are valid
    but less sharp.

    Args:
      cache: KVCache; donate it.
      key: [B, 1, K, H] after RoPE, bfloat16, float16 or float32; rounded to the cache's dtype.
      value: [B, 1, K, H], likewise.
      active: bool [B], rows that take the token; None for all.
      implementation: None picks "native" on CPU where the extension loads, else "xla".

    Returns:
      The cache; overflow, NaN and inf as in `prefill`.

    Raises:
      ValueError: wrong ranks, shapes or dtypes; a full row, where that can be known (outside jit); an implementation
        that is unknown or not available.
    """
    B = cache.shape[0]
    _check_tokens(cache, key, value)
    if key.shape[1] != 1:
        raise ValueError(f"key must hold one token, [B, 1, K, H]: got {key.shape}; use prefill for several")
    if active is None:
        active = jnp.ones((B,), bool)
    elif active.shape != (B,) or active.dtype != bool:
        raise ValueError(f"active must be bool [B={B}]: got {active.dtype} {active.shape}")
    _check_room(cache, active.astype(jnp.int32), 1)

    def native(cache, key, value, active):
        one = lambda x: to_storage(x[:, 0], cache.dtype)
        return _ffi.append(cache, one(key), one(value), active)

    def xla(cache, key, value, active):
        return _write(cache, key, value, active.astype(jnp.int32), None, calibrate=False)

    return dispatch(implementation, native, xla)(cache, key, value, active)


def _check_tokens(cache: KVCache, key, value) -> None:
    B, K, _, H = cache.shape
    for name, x in (("key", key), ("value", value)):
        if x.ndim != 4 or (x.shape[0], *x.shape[2:]) != (B, K, H):
            raise ValueError(f"{name} must be [B={B}, T, K={K}, H={H}]: got {x.shape}")
        if jnp.dtype(x.dtype).name not in STORAGE:
            raise ValueError(f"{name} must be bfloat16, float16 or float32: got {x.dtype}")
    if key.shape != value.shape:
        raise ValueError(f"key and value must have the same shape: got {key.shape} and {value.shape}")


def _check_room(cache: KVCache, lengths: jax.Array, T: int) -> None:
    """Raises where the numbers are concrete; inside jit the row is marked invalid instead."""
    if any(isinstance(x, jax.core.Tracer) for x in (cache.length, lengths)):
        return
    for b, (have, more) in enumerate(zip(cache.length.tolist(), lengths.tolist(), strict=True)):
        if not 0 <= more <= T:
            raise ValueError(f"lengths[{b}] must lie in 0 … T={T}: got {more}")
        if have + more > cache.capacity:
            raise ValueError(
                f"row {b} holds {have} tokens and {more} more exceed the cache's capacity of {cache.capacity}; "
                "make it larger in init_cache"
            )


def _update_rows(buffer: jax.Array, new: jax.Array, start: jax.Array, count: jax.Array) -> jax.Array:
    """Writes new[b, :, :count[b]] at buffer[b, :, start[b]:], row by row and in place; start + count ≤ S is the
    caller's.
    """
    S, T = buffer.shape[2], new.shape[2]
    tail = buffer.shape[3:]

    def row(b, buffer):
        first = jnp.clip(start[b], 0, S - T)  # the slice must fit; what it covers beyond the tokens is written back
        where = (b, 0, first, *(0 for _ in tail))
        old = jax.lax.dynamic_slice(buffer, where, (1, buffer.shape[1], T, *tail))
        source = first + jnp.arange(T) - start[b]
        keep = ((source >= 0) & (source < count[b])).reshape(1, 1, T, *(1 for _ in tail))
        moved = jnp.take(new[b][None], jnp.clip(source, 0, T - 1), axis=2)
        return jax.lax.dynamic_update_slice(buffer, jnp.where(keep, moved, old), where)

    return jax.lax.fori_loop(0, buffer.shape[0], row, buffer)


@functools.partial(jax.jit, static_argnames="calibrate")  # one program outside jit too; inlined inside
def _write(
    cache: KVCache, key: jax.Array, value: jax.Array, lengths: jax.Array, query: jax.Array | None, *, calibrate: bool
) -> KVCache:
    """The jnp definition of prefill and append."""
    if not cache.shape[0]:
        return cache
    S, T = cache.capacity, key.shape[1]
    here = jnp.arange(T)[None, :] < lengths[:, None]  # [B, T]
    stored = [jnp.swapaxes(to_storage(x, cache.dtype), 1, 2) for x in (key, value)]
    key, value = (from_storage(x, cache.dtype) for x in stored)  # [B, K, T, H] as the cache will hold them
    finite = (jnp.isfinite(key) & jnp.isfinite(value)).all((1, 3))
    fits = (lengths >= 0) & (lengths <= T) & (cache.length + lengths <= S)
    valid = cache.valid & fits & (finite | ~here).all(1)
    count = jnp.where(valid, lengths, 0)
    mask = (here & valid[:, None])[:, None, :, None]  # [B, 1, T, 1]
    if calibrate:
        cache = _calibrate(cache, key, value, mask, query)

    norms = {
        "value_size": to_bf16_bits_up(norm_up(value - cache.value_center[:, :, None])),
        "value_norm": to_bf16_bits_up(norm_up(value)),
    }
    update = functools.partial(_update_rows, start=cache.length, count=count)
    new: dict[str, Any] = {"key": update(cache.key, stored[0]), "value": update(cache.value, stored[1])}
    new |= {name: update(getattr(cache, name), x) for name, x in norms.items()}
    new["key_norm_max"] = jnp.maximum(cache.key_norm_max, jnp.where(mask[..., 0], norm_up(key), 0).max(2, initial=0))
    new["length"] = cache.length + count
    new["valid"] = valid
    return _encode_touched(dataclasses.replace(cache, **new), cache.length, T)


def _calibrate(cache: KVCache, key, value, mask, query) -> KVCache:
    """Fixes value centre, channel weights and channel order of rows that are still empty."""
    first = ((cache.length == 0) & mask.any((1, 2, 3)))[:, None, None]  # [B, 1, 1]
    total = jnp.maximum(mask.sum(2), 1).astype(jnp.float32)

    def mean(x):
        return jnp.where(mask, x, 0).sum(2) / total

    center = mean(value)
    center = jnp.where(jnp.isfinite(center), center, 0)  # the sum may overflow
    spread = jnp.sqrt(mean((key - mean(key)[:, :, None]) ** 2))  # [B, K, H]
    weight = jnp.ones_like(spread)
    if query is not None:
        B, K, T, H = key.shape
        square = (query.astype(jnp.float32) ** 2).reshape(B, T, K, -1, H).mean(3).swapaxes(1, 2)
        square = mean(square)
        floor = 0.01 * square.mean(-1, keepdims=True)  # keeps every weight positive; certificate valid for any
        usable = jnp.isfinite(square).all(-1, keepdims=True) & (floor > 1e-30)
        weight = jnp.where(usable, jnp.sqrt(square + floor), 1)
    order = jnp.argsort(-weight * spread, axis=-1).astype(jnp.int32)
    return dataclasses.replace(
        cache,
        value_center=jnp.where(first, center, cache.value_center),
        channel_weight=jnp.where(first, weight, cache.channel_weight),
        channel_order=jnp.where(first, order, cache.channel_order),
    )


def _encode_touched(cache: KVCache, old_length: jax.Array, T: int) -> KVCache:
    """Codes the blocks that T tokens after `old_length` touched; an unfinished block is coded again once it is full."""
    B, K, S, H = cache.shape
    blocks = S // BLOCK
    touched = min((T + 2 * BLOCK - 2) // BLOCK, blocks)
    names = ("codes", "code_scale", "code_zero", "residual_ratio", "residual_norm")

    def row(b, fields):
        first = jnp.clip(old_length[b] // BLOCK, 0, blocks - touched)
        keys = jax.lax.dynamic_slice(cache.key, (b, 0, first * BLOCK, 0), (1, K, touched * BLOCK, H))[0]
        keys = from_storage(keys, cache.dtype).reshape(K, touched, BLOCK, H)
        new = encode_blocks(keys, cache.channel_weight[b], cache.channel_order[b])
        full = (first + jnp.arange(touched)) < cache.length[b] // BLOCK
        largest = jnp.where(full[None, :, None], new["code_scale"], 0).max(1)
        out = {"scale_max": fields["scale_max"].at[b].max(largest)}
        for name in names:
            at = first * BLOCK if name == "residual_norm" else first
            where = (b, 0, at, *(0 for _ in new[name].shape[2:]))
            out[name] = jax.lax.dynamic_update_slice(fields[name], new[name][None], where)
        return out

    fields = {name: getattr(cache, name) for name in (*names, "scale_max")}
    return dataclasses.replace(cache, **jax.lax.fori_loop(0, B, row, fields))
