"""Selections as masks, for budgets that are traced: no shape depends on how many keys are read."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def top(score: jax.Array, count: Any, allowed: jax.Array | bool = True) -> jax.Array:
    """The `count` largest of the allowed entries, among equals the first ones.

    Args:
      score: float32 [A, n], without NaN; A is G, or 1 for the whole group.
      count: integer, or [A, 1]; all allowed entries where there are fewer.
      allowed: bool [A, n] or [1, n].

    Returns:
      bool [A, n]. Cost: 33 passes over the scores.
    """
    bits, allowed = _bits(score, allowed)
    size = lambda mask: mask.sum(-1, keepdims=True).astype(jnp.int32)
    count = jnp.minimum(jnp.asarray(count, jnp.int32), size(allowed))
    least = _largest(bits, lambda mask: size(mask) >= count)
    above, equal = bits > least, (bits == least) & allowed
    return above | (equal & (jnp.cumsum(equal, -1, dtype=jnp.int32) <= count - size(above)))


def top_mass(weight: jax.Array, mass: Any, allowed: jax.Array | bool = True) -> jax.Array:
    """The fewest allowed entries whose weights sum to at least `mass`; all of them where they do not.

    Args:
      weight: float32 [A, n], not negative.
      mass: scalar, or [A, 1].
      allowed: bool [A, n] or [1, n].

    Returns:
      bool [A, n]. Cost: 33 passes over the weights.
    """
    bits, allowed = _bits(weight, allowed)
    total = lambda mask: jnp.where(mask, weight, 0).sum(-1, keepdims=True)
    least = _largest(bits, lambda mask: total(mask & allowed) >= mass)
    above, equal = (bits > least) & allowed, (bits == least) & allowed
    missing = mass - total(above)
    each = jnp.where(equal, weight, 0).max(-1, keepdims=True)
    needed = jnp.where(each > 0, jnp.ceil(missing / jnp.maximum(each, jnp.float32(1e-37))), jnp.inf)
    return above | (equal & (missing > 0) & (jnp.cumsum(equal, -1, dtype=jnp.float32) <= needed))


def fill(score: jax.Array, sizes: jax.Array, budget: Any) -> jax.Array:
    """Whole blocks in descending order of score, up to the first that does not fit.

    Args:
      score: float32 [A, C]; −inf is never taken.
      sizes: int32 [C], keys of the blocks; empty ones cost nothing.
      budget: keys.

    Returns:
      bool [A, C].
    """
    order = jnp.argsort(-score, axis=-1, stable=True)
    fits = jnp.cumsum(sizes[order], -1) <= budget
    taken = jnp.put_along_axis(jnp.zeros(score.shape, bool), order, fits, -1, inplace=False)
    return taken & (score > -jnp.inf)


def _bits(score: jax.Array, allowed: jax.Array | bool) -> tuple[jax.Array, jax.Array]:
    """uint32 in the order of the scores; 0, below every score, where not allowed."""
    allowed = jnp.broadcast_to(jnp.asarray(allowed), score.shape)
    raw = jax.lax.bitcast_convert_type(score.astype(jnp.float32), jnp.uint32)
    ordered = jnp.where(raw >> 31 == 1, ~raw, raw | jnp.uint32(1 << 31))
    return jnp.where(allowed, ordered, jnp.uint32(0)), allowed


def _largest(bits: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest threshold, [A, 1], at which {bits ≥ threshold} is enough, bit by bit; 0 where none is."""

    def body(i, least):
        higher = least | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(enough(bits >= higher), higher, least)

    return jax.lax.fori_loop(0, 32, body, jnp.zeros((bits.shape[0], 1), jnp.uint32))
