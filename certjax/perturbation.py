"""Fresh Exp(1) variables: U_i is a counter-based hash of (random key, row, kv head, key index), E_i = −ln U_i.

Four 32-bit words a, b, c, d per row and kv head come from JAX's own generator (Threefry by default), so the caller's
key, step, layer, row and head are absorbed by it. The key index i is then absorbed word by word through full
avalanches:

    high = mix(mix(i ⊕ a) ⊕ b),   low = mix(mix(i ⊕ c) ⊕ d),   U = (2²¹ high + ⌊low / 2¹¹⌋ + 1) · 2⁻⁵³  ∈ (0, 1].

U is never 0, and one in 2⁵³ is 1. `high` alone bounds E_i within 2⁻³² / U, so a scan can decide from 32 bits and only
candidates need the other 21. The variables are shared by the query heads of a kv head and do not depend on how keys
are sharded (i is the position). The words must be fresh for every step and layer: the certificate conditions on q, K
and V, which depend on earlier words.

Independence of the U_i is that of the hash, as with every pseudo-random generator; `mix` is a 32-bit bijection with
the xor-shift and multiply constants that a search for low avalanche bias gives (Wellons, "hash prospector", 2018).
"""

import jax
import jax.numpy as jnp


def mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 with full avalanche."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def row_words(rng: jax.Array, batch: int, kv_heads: int) -> jax.Array:
    """The four words of every row and kv head.

    Args:
      rng: one random key (rows are told apart by folding in their index), or one key a row, [B].
      batch: B.
      kv_heads: K.

    Returns:
      uint32 [B, K, 4].

    Raises:
      ValueError: rng is not a typed random key, or has another shape.
    """
    if not jax.dtypes.issubdtype(jnp.result_type(rng), jax.dtypes.prng_key):
        raise ValueError(f"rng must be a key made by jax.random.key: got {jnp.result_type(rng)} {jnp.shape(rng)}")
    if rng.shape not in ((), (batch,)):
        raise ValueError(f"rng must be one key or one key a row, shape () or ({batch},): got {rng.shape}")
    rows = rng if rng.shape else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(batch))
    return jax.vmap(lambda key: jax.random.bits(key, (kv_heads, 4), jnp.uint32))(rows)


def hash_bits(words: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`high` (32 bits) and `low` (21 bits) of U, each uint32 [..., n].

    Args:
      words: uint32 [..., 4].
      index: uint32, positions of the keys, broadcast against words[..., 0, None].
    """
    word = [words[..., i, None] for i in range(4)]
    high = mix(mix(index ^ word[0]) ^ word[1])
    low = mix(mix(index ^ word[2]) ^ word[3]) >> 11
    return high, low


def exponential(high: jax.Array, low: jax.Array) -> jax.Array:
    """E = −ln U as float32, relative error below 2⁻²¹ at both ends: 0 ≤ E ≤ 53 ln 2."""
    # Near U = 1 the logarithm is taken of the complement, which the 53 bits give exactly.
    u = high.astype(jnp.float32) * 2.0**-32 + (low.astype(jnp.float32) + 1) * 2.0**-53
    not_u = (~high).astype(jnp.float32) * 2.0**-32 + (jnp.uint32(2**21 - 1) - low).astype(jnp.float32) * 2.0**-53
    return jnp.where(high < jnp.uint32(1 << 31), -jnp.log(u), -jnp.log1p(-jnp.minimum(not_u, 0.5)))


def exponentials(words: jax.Array, count: int) -> jax.Array:
    """E_i of the keys 0 … count − 1: float32 [B, K, count]."""
    shape = (1,) * (words.ndim - 1) + (count,)
    return exponential(*hash_bits(words, jnp.arange(count, dtype=jnp.uint32).reshape(shape)))
