"""4-bit block codes of keys, their metadata, and deterministic bounds of scores.

A block is BLOCK = 64 consecutive keys. Channel c of a block has a step a (an 8-bit float, 3 mantissa bits, rounded
up) and an integer zero z, and key i the code n ∈ 0 … 15, decoded as k̂ = a · (z + n). The zero is a multiple of the
step, so it costs no second scale and no calibration.

What the codes miss is *measured*, from the stored codes, never assumed: per block the largest |k − k̂| ÷ (a / 2)
(`residual_ratio`), per key ‖w ∘ (k − k̂)‖ (`residual_norm`, any positive weights w). So the bounds hold whatever was
coded: clipped steps, outliers, subnormals. For a query q, with p = q ∘ a:

    q·k = Σ_c p_c (z_c + n_c) + q·(k − k̂),    |q·(k − k̂)| ≤ min( ratio/2 · Σ|p|,  ‖q / w‖ · ‖w ∘ (k − k̂)‖ ).

The first sum is evaluated with an int8 query: p = step · p₈ + r, one step per head and half of the channels
(`channel_order`), fixed over the blocks, and Σ r n = 7.5 Σ r ± 7.5 Σ|r|. The integer dots are exact. Float rounding
is bounded by γ times the sum of the magnitudes |p (z + n)| ≤ 144 |p|, γ = (H + 32) 2⁻²³ (any order of summation; twice
what two evaluations of ≤ H + 8 roundings need).

Layout of `codes` in a block, chosen for dot products of 4 unsigned with 4 signed bytes: 16 keys side by side, a line
of 64 bytes for 8 channels. Byte b of the 32-bit lane k in line j holds position 4j + b of the channel order in its
low nibble and position H/2 + 4j + b in its high nibble. `code_scale`, `code_zero` and `scale_max` are in channel
order too.
"""

import jax
import jax.numpy as jnp

from certjax.types import BLOCK, LANES, KVCache

_SCALE_BIAS = 107 << 3  # the byte 0 means 2⁻²⁰, the byte 255 means 1.875 · 2¹¹


def encode_scale_up(x: jax.Array) -> jax.Array:
    """Smallest 8-bit step ≥ x (float32 ≥ 0), clipped to the largest one. Returns uint8."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    # Beyond the clip nothing may wrap: inf has bits below 2³¹ − 2²⁰.
    return jnp.clip(((bits + 0xFFFFF) >> 20) - _SCALE_BIAS, 0, 255).astype(jnp.uint8)


def decode_scale(byte: jax.Array) -> jax.Array:
    """The step that a byte means, float32."""
    return jax.lax.bitcast_convert_type((byte.astype(jnp.int32) + _SCALE_BIAS) << 20, jnp.float32)


def to_bf16_bits_up(x: jax.Array) -> jax.Array:
    """Bits of the smallest bfloat16 ≥ x (float32 ≥ 0, or inf), as uint16."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits + jnp.uint32(0xFFFF)) >> 16).astype(jnp.uint16)


def from_bf16_bits(bits: jax.Array) -> jax.Array:
    """The float32 value of bfloat16 bits in uint16."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32)


def norm_up(x: jax.Array) -> jax.Array:
    """Upper bound of the Euclidean norm over the last axis (float32), whatever the order of summation and the
    magnitude.
    """
    slack = 1 + (x.shape[-1] + 12) * 2.0**-23
    # Powers of two keep the squares from under- and overflowing. Not the largest entry itself: XLA multiplies by its
    # inverse, and flushes that to zero where it is subnormal.
    largest = jnp.abs(x).max(-1, keepdims=True)
    factor = jnp.where(largest > 1e15, 2.0**-80, jnp.where(largest < 1e-15, 2.0**80, 1.0)).astype(jnp.float32)
    back = jnp.where(largest > 1e15, 2.0**80, jnp.where(largest < 1e-15, 2.0**-80, 1.0)).astype(jnp.float32)
    scaled = x * factor
    return jnp.sqrt(jnp.sum(scaled * scaled, axis=-1)) * jnp.float32(slack) * back[..., 0]


def encode_blocks(key: jax.Array, channel_weight: jax.Array, channel_order: jax.Array) -> dict[str, jax.Array]:
    """Codes whole blocks of keys.

    Args:
      key: float32 [..., P, BLOCK, H].
      channel_weight: float32 [..., H], positive.
      channel_order: int32 [..., H], a permutation.

    Returns:
      The fields codes, code_scale, code_zero, residual_ratio, residual_norm of `KVCache` for these blocks.
    """
    lead, (blocks, _, head_dim) = key.shape[:-3], key.shape[-3:]
    ordered = jnp.take_along_axis(key, channel_order[..., None, None, :], axis=-1)
    weight = jnp.take_along_axis(channel_weight, channel_order, axis=-1)[..., None, None, :]
    low, high = ordered.min(-2), ordered.max(-2)  # [..., P, H]
    # Nearest codes reach from z − ½ to z + 15½, so a range of 15 steps fits wherever the zero falls.
    wanted = jnp.maximum((high - low) * jnp.float32(1 / 15), jnp.abs(low) * jnp.float32(1 / 127))
    scale_byte = encode_scale_up(wanted)
    scale = decode_scale(scale_byte)
    # Written out: XLA divides by a broadcast scale through its inverse anyway, and the extension must code the same
    # bytes.
    inverse = 1 / scale
    zero = jnp.clip(jnp.floor(low / scale + jnp.float32(0.5)), -128, 127)
    codes = jnp.clip(jnp.round(ordered * inverse[..., None, :]) - zero[..., None, :], 0, 15)
    residual = ordered - scale[..., None, :] * (zero[..., None, :] + codes)
    ratio = (jnp.abs(residual) / (0.5 * scale[..., None, :])).max((-2, -1)) * jnp.float32(1 + 2.0**-21)
    nibbles = codes.astype(jnp.uint8).reshape(*lead, blocks, BLOCK // LANES, LANES, 2, head_dim // 8, 4)
    nibbles = jnp.moveaxis(nibbles, -4, -2)  # [..., P, groups, 2, H/8, LANES, 4]
    packed = nibbles[..., 0, :, :, :] | (nibbles[..., 1, :, :, :] << 4)
    return {
        "codes": packed.reshape(*lead, blocks, BLOCK // LANES, head_dim // 8, 4 * LANES),
        "code_scale": scale_byte,
        "code_zero": zero.astype(jnp.int8),
        "residual_ratio": ratio,
        "residual_norm": to_bf16_bits_up(norm_up(weight * residual)).reshape(*lead, blocks * BLOCK),
    }


def unpack_codes(codes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two halves of the channels, each uint8 [..., P, BLOCK, H // 2], positions in channel order."""
    *lead, groups, lines, _ = codes.shape
    byte = jnp.swapaxes(codes.reshape(*lead, groups, lines, LANES, 4), -3, -2).reshape(*lead, BLOCK, 4 * lines)
    return byte & 15, byte >> 4


def score_bounds(query: jax.Array, cache: KVCache) -> tuple[jax.Array, jax.Array]:
    """Estimate and half-width of every coded score.

    Args:
      query: float32 [B, K, G, H], already multiplied by the softmax scale.
      cache: the layer's cache; keys beyond the last full block give meaningless values, to be masked by the caller.

    Returns:
      (estimate, half_width), float32 [B, K, G, S]: |q·k − estimate| ≤ half_width for every coded key, and the same for
      any float32 evaluation of q·k. Cost: one pass over 4-bit codes and metadata, H/2 + 4 bytes a key.
    """
    head_dim = query.shape[-1]
    half = head_dim // 2
    gamma = jnp.float32((head_dim + 32) * 2.0**-23)
    ordered = jnp.take_along_axis(query, cache.channel_order[:, :, None, :], axis=-1)
    reach = (jnp.abs(ordered) * decode_scale(cache.scale_max)[:, :, None, :]).reshape(*ordered.shape[:-1], 2, half)
    step = jnp.maximum(reach.max(-1), jnp.float32(1e-30)) / 127  # [B, K, G, 2]
    scaled = ordered[:, :, :, None, :] * decode_scale(cache.code_scale)[:, :, None]  # p, [B, K, G, P, H]
    halves = scaled.reshape(*scaled.shape[:-1], 2, half)
    int8 = jnp.clip(jnp.round(halves / step[:, :, :, None, :, None]), -127, 127)
    rest = halves - step[:, :, :, None, :, None] * int8
    zero = cache.code_zero.astype(jnp.float32)[:, :, None]
    base = (scaled * zero).sum(-1) + 7.5 * rest.sum((-2, -1))  # [B, K, G, P]
    dots = [  # exact: |dot| ≤ 15 · 127 · H / 2 < 2²⁴
        jnp.einsum("bkgpc,bkpnc->bkgpn", int8[..., i, :], nibbles.astype(jnp.float32))
        for i, nibbles in enumerate(unpack_codes(cache.codes))
    ]
    estimate = base[..., None] + step[:, :, :, None, None, 0] * dots[0] + step[:, :, :, None, None, 1] * dots[1]
    weighted = norm_up(query / cache.channel_weight[:, :, None, :])  # ‖q / w‖, [B, K, G]
    size = jnp.abs(scaled)
    by_step = 0.5 * cache.residual_ratio[:, :, None] * size.sum(-1)  # [B, K, G, P]
    by_norm = weighted[..., None] * from_bf16_bits(cache.residual_norm)[:, :, None]  # [B, K, G, S]
    residual = jnp.minimum(by_step[..., None], by_norm.reshape(estimate.shape))
    rounding = 7.5 * jnp.abs(rest).sum((-2, -1)) + 144 * gamma * size.sum(-1)  # |z + n| ≤ 144
    half_width = (rounding[..., None] + residual) * (1 + 4 * gamma)
    shape = (*query.shape[:3], -1)
    return estimate.reshape(shape), half_width.reshape(shape)
