"""Rotary position embedding: frequencies, angles at long range, and the rotation itself.

A float32 product of position and frequency is off by up to 4e-3 radians at position 10⁵, and the implementations that
models are trained and published with compute just that. So there are two kinds of angles: "reference" rounds step by
step as the reference implementation does, for the same logits at every position; "exact" is accurate to 1e-6 whatever
the position.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from certjax.models.llama.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per token of each rotated pair of channels, float64 [H / 2].

    default: f_j = theta^(−2j/H). linear: f_j / factor. dynamic: default with a base that grows with the context, see
    `_base`. llama3: by wavelength λ = 2π/f, long ones are divided by the factor, short ones kept, between them the two
    are blended linearly in original_max_positions / λ. yarn: the same idea with the blend linear in the channel index,
    between the channels that turn beta_fast and beta_slow times over the original context. longrope: f_j divided by
    short_factor[j], or by long_factor[j] for contexts beyond the original one.

    Source: RoFormer (arXiv 2104.09864); Llama 3.1 model card; YaRN (arXiv 2309.00071), for dynamic too; LongRoPE
    (arXiv 2402.13753).
    """
    frequency = _base(rope, head_dim) ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type in ("default", "dynamic"):
        return frequency
    if rope.rope_type == "longrope":
        return frequency / np.asarray(_factors(rope))
    stretched = frequency / rope.factor
    if rope.rope_type == "linear":
        return stretched
    if rope.rope_type == "llama3":
        turns = rope.original_max_positions * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        low, high = _yarn_band(rope, head_dim)
        keep = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    keep = np.clip(keep, 0, 1)
    return keep * frequency + (1 - keep) * stretched


def _base(rope: RopeConfig, head_dim: int) -> float:
    """theta; dynamic: theta (factor · context / original − factor + 1)^(H / (H − 2)) beyond the original context."""
    if rope.rope_type != "dynamic" or rope.context <= rope.original_max_positions:
        return float(rope.theta)
    growth = rope.factor * rope.context / rope.original_max_positions - (rope.factor - 1)
    return rope.theta * growth ** (head_dim / (head_dim - 2))


def _factors(rope: RopeConfig) -> tuple[float, ...]:
    return rope.long_factor if rope.context > rope.original_max_positions else rope.short_factor  # type: ignore


def _yarn_band(rope: RopeConfig, head_dim: int) -> tuple[int, int]:
    """First and last pair of channels of the ramp between kept and stretched frequencies."""
    low = math.floor(_yarn_channel(rope, head_dim, 32.0 if rope.beta_fast is None else rope.beta_fast))
    high = math.ceil(_yarn_channel(rope, head_dim, 1.0 if rope.beta_slow is None else rope.beta_slow))
    return max(low, 0), min(high, head_dim - 1)


def _yarn_channel(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The (real-valued) pair that turns so many times over the original context."""
    return head_dim * math.log(rope.original_max_positions / (2 * math.pi * turns)) / (2 * math.log(rope.theta))


def attention_factor(rope: RopeConfig) -> float:
    """Scale of cos and sin: what the configuration says or, for yarn and longrope, implies; 1 for the other types."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.rope_type not in ("yarn", "longrope") or rope.factor <= 1:
        return 1.0
    if rope.rope_type == "yarn":
        return 0.1 * math.log(rope.factor) + 1.0
    return math.sqrt(1 + math.log(rope.factor) / math.log(rope.original_max_positions))


def reference_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """`inverse_frequencies` as the reference implementation rounds them: every step in float32, [H / 2]."""
    f32 = np.float32
    power = (np.float64(_base(rope, head_dim)) ** (np.arange(0, head_dim, 2).astype(f32) / f32(head_dim))).astype(f32)
    if rope.rope_type == "longrope":
        power = np.asarray(_factors(rope), f32) * power
    frequency = f32(1) / power
    if rope.rope_type == "linear":
        frequency = frequency / f32(rope.factor)
    if rope.rope_type == "llama3":
        wavelength = f32(2 * math.pi) / frequency
        low, high = rope.low_freq_factor, rope.high_freq_factor
        keep = (f32(rope.original_max_positions) / wavelength - f32(low)) / f32(high - low)
        slow = frequency / f32(rope.factor)
        blend = (f32(1) - keep) * slow + keep * frequency
        frequency = np.where(keep > 1, frequency, np.where(keep < 0, slow, blend))
    if rope.rope_type == "yarn":
        low, high = _yarn_band(rope, head_dim)
        ramp = np.clip((np.arange(head_dim // 2).astype(f32) - f32(low)) / f32(max(high - low, 1e-3)), 0, 1)
        keep = f32(1) - ramp
        frequency = f32(1) / (f32(rope.factor) * power) * (f32(1) - keep) + frequency * keep
    return frequency.astype(f32)


def rotary_tables(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every position.

    Args:
      rope: the rotary embedding; its `angles` says how they are rounded.
      head_dim: H.
      positions: int32 [...], not negative.

    Returns:
      cos and sin, float32 [..., H / 2], already multiplied by the attention factor.
    """
    scale = jnp.float32(attention_factor(rope))
    if rope.angles == "exact":
        angle = _exact_angles(rope, head_dim, positions)
    else:
        frequency = jnp.asarray(reference_frequencies(rope, head_dim)).reshape((1,) * positions.ndim + (-1,))
        angle = positions[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


def _exact_angles(rope: RopeConfig, head_dim: int, positions: jax.Array) -> jax.Array:
    """Angles in [−π, π). The turn count is a fixed-point number: uint32 products wrap, so whole turns drop out without
    rounding; what the 32 bits of the frequency leave out is added in float32.
    """
    turns = inverse_frequencies(rope, head_dim) / (2 * math.pi) * 2.0**32  # per token, in units of 2⁻³² turns
    whole = np.floor(turns)
    phase = positions[..., None].astype(jnp.uint32) * jnp.asarray(np.uint32(whole % 2.0**32)).reshape(
        (1,) * positions.ndim + (-1,)
    )
    rest = jnp.asarray((turns - whole) * 2.0**-32, jnp.float32).reshape((1,) * positions.ndim + (-1,))
    # As a signed number the phase lies in [−½, ½) turns, where float32 is finest.
    fraction = jax.lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-32)
    return (fraction + positions[..., None].astype(jnp.float32) * rest) * jnp.float32(2 * math.pi)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Turns channel j together with channel j + H/2, the layout of Hugging Face checkpoints.

    Args:
      x: [B, T, heads, H].
      cos: [B, T, H / 2].
      sin: the same.

    Returns:
      As x.
    """
    first, second = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
