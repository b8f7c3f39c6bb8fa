"""What a strategy builds over the keys of one kv head, what it answers, and the attention that follows a retrieval."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from certjax.retrieval import host


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """An index over the pool: keys `start` … `stop` − 1 of one kv head, n of them.

    Attributes:
      points: float32 [n, D], the indexed points, where the oracle is `Flat`; else None.
      handle: int32 [], the number of an oracle outside JAX (host.py); None with `points`.
      exponentials: float32 [n], −ln u_i of the keys, drawn when the index was built: errors of different queries of
        one index are not independent.
      order: int32 [budget], keys in random order, for uniform samples; None where there are none.
      rng: the key that u came from, so that appended keys continue it.
      start: sinks (static).
      stop: end of the pool (static): keys from here on are read exactly until `append` moves them in.
    """

    points: jax.Array | None
    handle: jax.Array | None
    exponentials: jax.Array
    order: jax.Array | None
    rng: jax.Array
    start: int = dataclasses.field(metadata={"static": True})
    stop: int = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class RetrievalResult:
    """Attention of G query heads over one kv head. No field bounds the error of this call.

    Attributes:
      output: [G, H], the query's dtype; zeros where every weight is zero, NaN where the query is not finite.
      ids: int32 [G, m], positions in the cache of the retrieved keys, −1 where there is none.
      log_weights: float32 [G, m], ln of the weight each counts; −inf where none, and for the threshold's key.
      log_threshold: float32 [G], ln τ; −inf where the weights are not those of a priority sample.
      log_denominator: float32 [G], ln of the estimated sum of e^s over all keys.
      keys_requested: int32 [G], keys asked of oracles, repeated questions counted again.
      keys_direct: int32 [G], pool keys read without asking an oracle.
      keys_used: int32 [G], pool keys that carry weight in the output.
      failed: bool [G], True where the strategy knows that it did not get what it is defined by: an oracle returned
        fewer keys than it was asked for and holds, pool keys are beyond the length, the query is not finite, or what
        the strategy names itself.
    """

    output: jax.Array
    ids: jax.Array
    log_weights: jax.Array
    log_threshold: jax.Array
    log_denominator: jax.Array
    keys_requested: jax.Array
    keys_direct: jax.Array
    keys_used: jax.Array
    failed: jax.Array


def release(index: Index) -> None:
    """Frees the oracle of an index that lives outside JAX. Such an index is kept until then; programs that use it
    afterwards fail. Does nothing to an index that JAX holds.
    """
    if index.handle is not None:
        host.release(index.handle)


def scores(query: jax.Array, rows: jax.Array, scale: float) -> jax.Array:
    """Scores q·k · scale in float32: query [G, H], rows [G, m, H] to [G, m]."""
    return jnp.einsum("gh,gmh->gm", query.astype(jnp.float32), rows.astype(jnp.float32)) * scale


def combine(
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    index: Index,
    ids: jax.Array,
    log_weights: jax.Array,
    length: jax.Array,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """Attention over retrieved keys with given weights, and over the sinks and the window exactly.

    Args:
      query: [G, H].
      keys: [S, H].
      values: [S, H].
      index: says which keys are exact.
      ids: int32 [G, m], positions in the cache, −1 for none.
      log_weights: [G, m].
      length: int32 [], keys that exist.
      scale: factor on q·k.

    Returns:
      output [G, H] float32, ln of the denominator [G].
    """
    exact = np.concatenate([np.arange(index.start), np.arange(index.stop, keys.shape[0])])
    log_exact = jnp.einsum("gh,mh->gm", query.astype(jnp.float32), keys[exact].astype(jnp.float32)) * scale
    log_exact = jnp.where((exact < length)[None], log_exact, -jnp.inf)
    top = jnp.maximum(log_exact.max(-1, initial=-jnp.inf), log_weights.max(-1, initial=-jnp.inf))
    top = jnp.where(jnp.isneginf(top), 0, top)
    w_exact = jnp.exp(log_exact - top[:, None])
    w_sampled = jnp.exp(log_weights - top[:, None])
    rows = values[jnp.maximum(ids, 0)].astype(jnp.float32)
    # A missing row may be anything, NaN too: 0 · NaN would spread.
    rows = jnp.where((w_sampled == 0)[..., None], 0, rows)
    beyond = jnp.where((exact < length)[:, None], values[exact].astype(jnp.float32), 0)
    first = jnp.einsum("gm,mh->gh", w_exact, beyond) + jnp.einsum("gm,gmh->gh", w_sampled, rows)
    denominator = w_exact.sum(-1) + w_sampled.sum(-1)
    output = first / jnp.where(denominator == 0, 1, denominator)[:, None]
    return output, jnp.log(denominator) + top


def as_rows(x: Any) -> np.ndarray:
    """[…, H] of any float dtype as float32 numpy."""
    return np.asarray(jnp.asarray(x, jnp.float32))
