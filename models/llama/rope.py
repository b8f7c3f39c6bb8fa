"""Rotary position embedding: frequencies, angles that stay accurate at long range, and the rotation itself."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from certjax.models.llama.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Radians per token of each rotated pair of channels, float64 [H / 2].

    default: f_j = theta^(−2j/H). linear: f_j / factor. llama3: by wavelength λ = 2π/f, long ones are divided by the
    factor, short ones kept, between them the two are blended linearly in original_max_positions / λ. yarn: the same
    idea with the blend linear in the channel index, between the channels that turn beta_fast and beta_slow times over
    the original context.

    Source: RoFormer (arXiv 2104.09864); Llama 3.1 model card; YaRN (arXiv 2309.00071), section 3.2.
    """
    frequency = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "default":
        return frequency
    stretched = frequency / rope.factor
    if rope.rope_type == "linear":
        return stretched
    if rope.rope_type == "llama3":
        turns = rope.original_max_positions * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    else:
        low = math.floor(_yarn_channel(rope, head_dim, 32.0 if rope.beta_fast is None else rope.beta_fast))
        high = math.ceil(_yarn_channel(rope, head_dim, 1.0 if rope.beta_slow is None else rope.beta_slow))
        low, high = max(low, 0), min(high, head_dim - 1)
        keep = 1 - (np.arange(head_dim // 2) - low) / max(high - low, 1e-3)
    keep = np.clip(keep, 0, 1)
    return keep * frequency + (1 - keep) * stretched


def _yarn_channel(rope: RopeConfig, head_dim: int, turns: float) -> float:
    """The (real-valued) pair that turns so many times over the original context."""
    return head_dim * math.log(rope.original_max_positions / (2 * math.pi * turns)) / (2 * math.log(rope.theta))


def attention_factor(rope: RopeConfig) -> float:
    """Scale of cos and sin: 0.1 ln(factor) + 1 for yarn unless given, 1 for the other types."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rotary_tables(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cos and sin of every position, accurate to about 1e-6 whatever the position.

    A float32 product of position and frequency is off by 4e-3 radians at position 10⁵. Here the turn count is a
    fixed-point number: uint32 products wrap, so whole turns drop out without rounding; what the 32 bits of the
    frequency leave out is added in float32.

    Args:
      rope: the rotary embedding.
      head_dim: H.
      positions: int32 [...], not negative.

    Returns:
      cos and sin, float32 [..., H / 2], already multiplied by the attention factor.
    """
    turns = inverse_frequencies(rope, head_dim) / (2 * math.pi) * 2.0**32  # per token, in units of 2⁻³² turns
    whole = np.floor(turns)
    phase = positions[..., None].astype(jnp.uint32) * jnp.asarray(np.uint32(whole % 2.0**32)).reshape(
        (1,) * positions.ndim + (-1,)
    )
    rest = jnp.asarray((turns - whole) * 2.0**-32, jnp.float32).reshape((1,) * positions.ndim + (-1,))
    # As a signed number the phase lies in [−½, ½) turns, where float32 is finest.
    fraction = jax.lax.bitcast_convert_type(phase, jnp.int32).astype(jnp.float32) * jnp.float32(2.0**-32)
    angle = (fraction + positions[..., None].astype(jnp.float32) * rest) * jnp.float32(2 * math.pi)
    scale = jnp.float32(attention_factor(rope))
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


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
