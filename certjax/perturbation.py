"""Fresh Exp(1) variables: U_i is a counter-based hash of (random key, row, kv head, key index), E_i = −ln U_i.

Four 32-bit words a, b, c, d per row and kv head are Threefry-2x32 (Salmon et al., 2011) of the random key, row and
head; step and layer are in the key. It is written out here because `jax.random.bits` runs its rounds as a loop on
CPUs, which takes as long as a small decode step. The key index i is then absorbed word by word through full
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
    data = jax.random.key_data(rng)
    if data.shape[-1] % 2:
        raise ValueError(f"rng must be a threefry2x32, rbg or unsafe_rbg key: got {jnp.result_type(rng)}")
    data = data.reshape(-1, 1, 1, data.shape[-1])
    row = jnp.zeros((1,), jnp.uint32) if rng.shape else jnp.arange(batch, dtype=jnp.uint32)
    shape = (batch, kv_heads, 2)
    # The constant keeps these blocks apart from those that jax.random draws from the same key.
    first = jnp.broadcast_to((row + jnp.uint32(0x63657274))[:, None, None], shape)
    second = jnp.broadcast_to(jnp.arange(2 * kv_heads, dtype=jnp.uint32).reshape(1, kv_heads, 2), shape)
    for i in range(0, data.shape[-1], 2):
        first, second = threefry(data[..., i], data[..., i + 1], first, second)
    return jnp.stack([first, second], -1).reshape(batch, kv_heads, 4)


def threefry(key0: jax.Array, key1: jax.Array, x0: jax.Array, x1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds of the block (x0, x1): uint32, broadcast against each other."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    x0, x1 = x0 + keys[0], x1 + keys[1]
    for group in range(5):
        for rotation in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x0 = x0 + x1
            x1 = (x1 << rotation) | (x1 >> (32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


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
