"""Levels, predictions, sampling and Horvitz–Thompson sums of one head and level (certificate.md 4, 5 and 7).

Arrays are [B, K, G, S] over keys and [B, K, G] over heads; logarithms are relative to a deterministic reference c, so
w = exp(s − c).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from certjax.certificate import TINY

LEVELS_PER_DOUBLING = 2
_CHUNK = 1024  # keys a matrix product sums before float32 partial sums are added


class Scores(NamedTuple):
    """What a step knows of every key before it samples.

    Attributes:
      exact: s − c, [B, K, G, S].
      estimate: scan estimate of the same.
      half_width: |exact − estimate| at most.
      pool: bool [B, 1, 1, S], keys that are sampled.
      window: bool [B, 1, 1, S], attended keys that are always read.
      noise: E, [B, K, 1, S], shared by the heads of a group.
    """

    exact: jax.Array
    estimate: jax.Array
    half_width: jax.Array
    pool: jax.Array
    window: jax.Array
    noise: jax.Array


class Prediction(NamedTuple):
    """Deterministic predictions from the scan, [B, K, G]; they affect efficiency, never validity.

    Attributes:
      mass: of Z = Σ_pool w t.
      denominator: of D.
      scale_squared: of M².
      offset: r0, of the sizes t = √(ν² + r0²); 0 stands for z = w.
    """

    mass: jax.Array
    denominator: jax.Array
    scale_squared: jax.Array
    offset: jax.Array


class Sample(NamedTuple):
    """Masks and weights of one level.

    Attributes:
      exact_weight: w of exact and heavy keys, else 0.
      weight: g = w / π of the light keys drawn, else 0.
      miss: 1 − π of the light keys drawn, else 0.
      heavy: bool, z ≥ τ.
      light: bool, drawn with probability π < 1.
    """

    exact_weight: jax.Array
    weight: jax.Array
    miss: jax.Array
    heavy: jax.Array
    light: jax.Array


def total(x: jax.Array) -> jax.Array:
    """Sum over the last axis in blocks of 64, so that float32 rounding stays below 2⁻²⁴ (64 + 64 + S / 4096)."""
    for _ in range(2):
        padding = -x.shape[-1] % 64
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
        x = x.reshape(*x.shape[:-1], -1, 64).sum(-1)
    return x.sum(-1)


def totals(*arrays: jax.Array) -> list[jax.Array]:
    """`total` of each, in one reduction."""
    summed = total(jnp.stack(arrays))
    return [summed[i] for i in range(len(arrays))]


def weighted_rows(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """Σ_s weight[b, k, …, s] rows[b, k, s, h] in chunks of 1024 keys: [B, K, …, H]."""
    B, K, *middle, S = weight.shape
    padding = -S % _CHUNK
    weight = jnp.pad(weight.reshape(B * K, -1, S), ((0, 0), (0, 0), (0, padding)))
    rows = jnp.pad(rows.reshape(B * K, S, -1), ((0, 0), (0, padding), (0, 0)))
    # Batch axes lead: XLA on CPU is several times slower where it must find them.
    weight = jnp.swapaxes(weight.reshape(B * K, weight.shape[1], -1, _CHUNK), 1, 2).reshape(-1, weight.shape[1], _CHUNK)
    partial = jnp.matmul(weight, rows.reshape(-1, _CHUNK, rows.shape[-1]), precision="highest")
    return partial.reshape(B * K, -1, *partial.shape[1:]).sum(1).reshape(B, K, *middle, -1)


def prediction_weights(pool: jax.Array) -> jax.Array:
    """Which scan scores enter the predictions, and how often each counts: float32, the shape of `pool` [..., S].

    The first 64 keys (where sinks sit) count once; of the others every fourth group of 16 stands for four.
    """
    index = jnp.arange(pool.shape[-1])
    weight = jnp.where(index < 64, 1, jnp.where((index // 16) % 4 == 0, 4, 0)).astype(jnp.float32)
    return jnp.where(pool, weight.reshape((1,) * (pool.ndim - 1) + (-1,)), 0)


def predict(
    scores: Scores, value_size: jax.Array, value_norm: jax.Array, value_square: jax.Array, norm_size: bool
) -> Prediction:
    """Predictions from the scan of the pool and the exact window.

    Args:
      scores: Scores.
      value_size: ν, float32 [B, K, 1, S].
      value_norm: ‖v‖ as the metadata has it, [B, K, 1, S].
      value_square: ‖v‖² of exact values, [B, K, 1, S], used in the window only.
      norm_size: sizes t = √(ν² + r0²) with r0² = ½ Σ w̃ ν² / Σ w̃ (certificate.md 4); else z = w.
    """
    weight = prediction_weights(scores.pool) * jnp.exp(jnp.where(scores.pool, scores.estimate, -jnp.inf))
    window = jnp.where(scores.window, jnp.exp(jnp.where(scores.window, scores.exact, 0)), 0)
    pool_mass, second, squares, window_mass, window_squares = totals(
        weight,
        weight * value_size**2,
        weight * value_norm**2,
        window,
        window * jnp.where(scores.window, value_square, 0),
    )
    offset = jnp.zeros_like(pool_mass)
    mass = pool_mass
    if norm_size:
        square = second / jnp.maximum(pool_mass, TINY)
        largest = jnp.where(scores.pool, value_size, 0).max(-1)
        # Never 0, so that every size is positive: all values may equal the centre.
        offset = jnp.maximum(jnp.sqrt(0.5 * square), jnp.maximum(1e-4 * largest, 1e-12))
        # The root mean square of t for its mean: a little too large, and no second pass over the keys.
        mass = pool_mass * jnp.sqrt(square + offset**2)
    denominator = pool_mass + window_mass
    scale_squared = (squares + window_squares) / jnp.maximum(denominator, TINY)
    return Prediction(mass, denominator, scale_squared, offset)


def level_count(pool_keys: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Levels of the grid m_j = m_0 2^(j/2), m_0 = max(16, 0.3 / ε²), below half of the pool; 0 where none is
    (int32).
    """
    ratio = pool_keys.astype(jnp.float32) / 2 / first_size(epsilon)
    return jnp.ceil(LEVELS_PER_DOUBLING * jnp.log2(jnp.maximum(ratio, 1))).astype(jnp.int32)


def first_size(epsilon: jax.Array) -> jax.Array:
    """m_0, the expected sample of level 0."""
    return jnp.maximum(16, 0.3 / epsilon**2)


def level_size(level: jax.Array, epsilon: jax.Array) -> jax.Array:
    """m_j, the expected sample of a level at most (keys of weight above τ count once)."""
    return first_size(epsilon) * jnp.exp2(level.astype(jnp.float32) / LEVELS_PER_DOUBLING)


def log_threshold(level: jax.Array, mass: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Ln τ_j = ln(Z / m_j)."""
    log_m = jnp.log(first_size(epsilon)) + level.astype(jnp.float32) * (jnp.log(2.0) / LEVELS_PER_DOUBLING)
    return jnp.log(jnp.maximum(mass, TINY)) - log_m


def candidates(scores: Scores, log_size: jax.Array, log_tau: jax.Array) -> jax.Array:
    """Keys that the scan cannot exclude at this level: their upper bound and noise reach ln τ (bool)."""
    upper = scores.estimate + scores.half_width + log_size - log_tau[..., None]
    return scores.pool & ~(upper + scores.noise < 0)  # a NaN bound excludes nothing


def sample(scores: Scores, log_size: jax.Array, log_tau: jax.Array) -> Sample:
    """Draws the light keys of a level: one float32 score serves the test, π and w (certificate.md 10).

    Lowering τ only adds keys. Every key drawn is among `candidates`, since its exact score is below the upper bound.
    """
    log_pi = scores.exact + log_size - log_tau[..., None]
    heavy = scores.pool & (log_pi >= 0)
    light = scores.pool & (log_pi < 0) & (log_pi + scores.noise >= 0)
    weight = jnp.where(light, jnp.exp(log_tau)[..., None] * jnp.exp(-log_size), 0)
    exact_weight = jnp.where(scores.window | heavy, jnp.exp(jnp.where(scores.window | heavy, scores.exact, 0)), 0)
    miss = jnp.where(light, -jnp.expm1(jnp.where(light, log_pi, 0)), 0)
    return Sample(exact_weight, weight, miss, heavy, light)
