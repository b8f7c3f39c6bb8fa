"""Prompts into caches, chunk by chunk: exact attention in bounded memory, one compilation whatever the length."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

import certjax
from certjax.models.llama.modeling import Caches, Llama

_KEY_BLOCK = 256  # keys a pass of the online softmax; its scores, N·T·256 floats a row, are the largest buffer
_LOWEST = -1e30  # a finite stand-in for −inf: differences of two of them are not NaN


def prefill(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    caches: Caches,
    *,
    chunk: int = 512,
    progress: Callable[[int, int], None] | None = None,
    on_logits: Callable[[int, jax.Array], None] | None = None,
) -> tuple[jax.Array, Caches]:
    """Reads prompts into the caches, after what they hold, with exact attention.

    Args:
      model: the model.
      prompts: B sequences of token ids, none empty; lengths may differ.
      caches: one a layer, from `Llama.init_caches`; donated, so use the returned ones.
      chunk: tokens of each row a call of the compiled function; shorter where prompts or capacity are.
      progress: called after every chunk with the tokens done and the tokens in total, both of the longest row.
      on_logits: called for every chunk with the index of its first token and the logits [B, chunk, V] after each of its
        tokens; what lies behind the end of a row means nothing. Default: logits of the last token only.

    Returns:
      float32 logits [B, V] after the last token of each row, and the caches.

    Raises:
      ValueError: an empty prompt, ids outside the vocabulary, more tokens than the cache or the model can hold.

    Memory: beside weights and caches about B·chunk·(N·256 + 3·F) floats; the logits of a chunk where asked for.
    Attention reads the filled part of the cache only, in blocks of 256 keys.
    """
    ids, lengths = pack_prompts(prompts, model.config.vocab_size)
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk must be a positive integer, got {chunk!r}")
    check_room(model, caches, lengths, what="the prompt")
    model = model.with_attention("dense")  # no part of this: one compilation for every attention
    total = ids.shape[1]
    chunk = min(chunk, 1 << (total - 1).bit_length(), caches[0].capacity)
    ids = np.pad(ids, ((0, 0), (0, -total % chunk)))
    last = model.beside_weights(jnp.zeros((len(prompts), model.config.hidden_size), jnp.float32))
    for start in range(0, total, chunk):
        count = np.clip(lengths - start, 0, chunk).astype(np.int32)
        last, caches, logits = _prefill_chunk(
            model, caches, ids[:, start : start + chunk], count, last, all_logits=on_logits is not None
        )
        if on_logits is not None:
            on_logits(start, logits)
        if progress is not None:
            last.block_until_ready()  # dispatch is asynchronous: report what is done, not what is queued
            progress(min(start + chunk, total), total)
    return _last_logits(model, last), caches


def pack_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Ragged prompts as int32 ids [B, T], filled up with 0, and lengths [B].

    Raises:
      ValueError: no prompt, an empty one, or an id that is not an integer of the vocabulary.
    """
    if not len(prompts):
        raise ValueError("prompts is empty: give at least one prompt")
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for b, prompt in enumerate(prompts):
        row = np.asarray(prompt)
        if not row.size:
            raise ValueError(f"prompts[{b}] is empty: give at least one token, such as the begin-of-text token")
        if row.ndim != 1 or not np.issubdtype(row.dtype, np.integer):
            raise ValueError(f"prompts[{b}] must be a sequence of integers, got {row.dtype} of shape {row.shape}")
        if row.min() < 0 or row.max() >= vocab_size:
            bad = int(row[(row < 0) | (row >= vocab_size)][0])
            raise ValueError(f"prompts[{b}] has token id {bad}, outside the vocabulary 0 … {vocab_size - 1}")
        ids[b, : row.size] = row
    return ids, lengths


def unpadded(ids: ArrayLike, mask: ArrayLike) -> list[list[int]]:
    """Prompts for `generate` from a padded batch: no position and no key is spent on padding.

    Args:
      ids: integers [B, T], padded on the left or on the right.
      mask: [B, T], 1 or True for the tokens of a prompt.

    Raises:
      ValueError: shapes that differ, a mask of other numbers, a row whose tokens are not next to each other or that
        has none.
    """
    ids, mask = np.asarray(ids), np.asarray(mask)
    if ids.ndim != 2 or ids.shape != mask.shape:
        raise ValueError(f"ids and mask must be [B, T] alike: got {ids.shape} and {mask.shape}")
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"mask must hold 0 and 1 only, got {np.unique(mask)[:4].tolist()}")
    prompts = []
    for b, (row, kept) in enumerate(zip(ids, mask.astype(bool), strict=True)):
        places = np.flatnonzero(kept)
        if not places.size:
            raise ValueError(f"mask[{b}] is empty: give at least one token, such as the begin-of-text token")
        if places[-1] - places[0] + 1 != places.size:
            raise ValueError(f"mask[{b}] has a gap: the tokens of a prompt must be next to each other")
        prompts.append(row[kept].tolist())
    return prompts


def check_room(model: Llama, caches: Caches, more: np.ndarray, *, what: str) -> None:
    """Raises ValueError unless every row of the caches, and the model, can hold `more` [B] further tokens."""
    held = np.asarray(caches[0].length)
    if held.shape != more.shape:
        raise ValueError(f"the caches have {held.shape[0]} rows, expected {more.shape[0]}, one a prompt")
    need = held + more
    b = int(need.argmax())
    if need[b] > model.config.max_positions:
        raise ValueError(
            f"row {b} would hold {need[b]} tokens with {what}, but the model's longest context is "
            f"{model.config.max_positions}; shorten the prompt or generate less"
        )
    if need[b] > caches[0].capacity:
        raise ValueError(
            f"row {b} would hold {need[b]} tokens with {what}, but the cache's capacity is {caches[0].capacity}; "
            "make it larger in init_caches"
        )


@functools.partial(jax.jit, static_argnames=("all_logits",), donate_argnames=("caches", "last"))
def _prefill_chunk(model: Llama, caches: Caches, ids, count, last, *, all_logits: bool):
    """Ids [B, C], of which the first count [B] are true; `last` [B, D] keeps the newest true row of the last layer."""
    start = caches[0].length
    rotary = model.rotary(start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None])
    x = model.embed(ids)
    filled = []
    for layer, cache, window in zip(model.layers, caches, model.config.windows, strict=True):

        def attend(query, key, value, cache=cache, window=window):
            cache = certjax.prefill(cache, key, value, lengths=count, query=query)
            return chunk_attention(query, cache, start, count, window=window), cache

        x, cache = layer(x, rotary, attend)
        filled.append(cache)
    newest = jnp.take_along_axis(x, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
    last = jnp.where((count > 0)[:, None], newest, last)
    return last, tuple(filled), model.logits(x) if all_logits else None


@jax.jit
def _last_logits(model: Llama, last: jax.Array) -> jax.Array:
    return model.logits(last)


def chunk_attention(
    query: jax.Array, cache: "certjax.KVCache", start: jax.Array, count: jax.Array, *, window: int | None
) -> jax.Array:
    """Exact causal attention of T new queries of each row over its cache, which holds their keys already.

    An online softmax over blocks of keys: the number of blocks follows what the rows hold, not the capacity, and blocks
    that lie before every row's window are not read. Blocks that every query sees whole, most of a long cache, need no
    mask.

    Args:
      query: float32 [B, T, N, H]; query i of row b stands at position start[b] + i.
      cache: one layer.
      start: int32 [B], tokens that a row held before.
      count: int32 [B], how many of the T queries are true; the output of the others means nothing.
      window: attend to the newest `window` positions only, the query's own included; None for all.

    Returns:
      float32 [B, T, N, H].
    """
    B, T, N, H = query.shape
    _, K, S, _ = cache.shape
    size = min(_KEY_BLOCK, S)
    query = (query * jnp.float32(H**-0.5)).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)  # [B, K, G, T, H]
    query = query.reshape(B, K, N // K * T, H)
    position = start[:, None] + jnp.arange(T, dtype=jnp.int32)[None]  # [B, T]

    def visible(i, first):
        """[B, 1, 1, T, size]: keys of a block that a query may see."""
        index = first + jnp.arange(size, dtype=jnp.int32)
        distance = position[:, :, None] - index[None, None, :]
        # The last block of a capacity that is no multiple of the size overlaps its predecessor: each key counts once.
        mask = (distance >= 0) & (index >= i * size)[None, None, :]
        if window is not None:
            mask &= distance < window
        return mask[:, None, None]

    def block(i, carry, *, masked):
        top, total, out = carry
        first = jnp.minimum(i * size, S - size)
        key, value = (
            _as_float32(jax.lax.dynamic_slice_in_dim(x, first, size, 2), cache) for x in (cache.key, cache.value)
        )
        scores = jnp.einsum("BKQH,BKSH->BKQS", query, key).reshape(B, K, N // K, T, size)
        mask = visible(i, first) if masked else jnp.bool_(True)
        scores = jnp.where(mask, scores, _LOWEST)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0)
        shrink = jnp.exp(top - new_top)
        read = jnp.einsum("BKQS,BKSH->BKQH", weights.reshape(B, K, -1, size), value).reshape(out.shape)
        return new_top, total * shrink + weights.sum(-1), out * shrink[..., None] + read

    shape = (B, K, N // K, T)
    init = (jnp.full(shape, _LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, H), jnp.float32))
    end = jnp.where(count > 0, start + count, 0).max()
    oldest = jnp.where(count > 0, start, end).min()  # rows without new tokens do not hold the others back
    if window is None:
        begin = oldest // size
        init = jax.lax.fori_loop(0, begin, functools.partial(block, masked=False), init)
    else:
        begin = jnp.maximum(oldest - (window - 1), 0) // size
    _, total, out = jax.lax.fori_loop(begin, -(-end // size), functools.partial(block, masked=True), init)
    out = out / jnp.maximum(total, jnp.float32(1e-30))[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def _as_float32(stored: jax.Array, cache: "certjax.KVCache") -> jax.Array:
    """The values of a slice of the cache; bfloat16 lies there as bits (see `KVCache`)."""
    if cache.dtype == "bfloat16":
        return jax.lax.bitcast_convert_type(stored.astype(jnp.uint32) << 16, jnp.float32)
    return stored.astype(jnp.float32)
