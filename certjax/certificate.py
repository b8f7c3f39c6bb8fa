"""The certificate: bounds on ‖ô − o‖ from one level's sums, valid for an unknown o, and the budgets of its events.

Notation. R + B: exact and heavy keys; A: light keys, included with probability π_i = z_i / τ, weight g_i = w_i / π_i;
S ⊂ A: those drawn. y = v − c0, ô the Horvitz–Thompson ratio, D̂ its denominator, x0 = ‖ô − c0‖, b = ‖ô − o‖. Since
Σ_i w_i (v_i − o) = 0,

    ô − o = Z / D̂,    Z = Σ_A (X_i − π_i) g_i (v_i − o),                                                    (identity)

so no interval for the denominator is needed, and o is deterministic given q, K, V: the concentration inequalities
apply to Z at the true o, and only upper bounds of its variance at an unknown o within b of ô are needed. With z_i =
w_i t_i, t_i = √(ν_i² + r0²), ν_i ≥ ‖v_i − c0‖, a light key has g_i ‖v_i − o‖ ≤ τ rng(‖o − c0‖), rng(x) = min(√(1 +
x²/r0²), (ν_max + x) / t_min): Cauchy–Schwarz on ν + x, and monotone.

A claim "b ≤ b*" is tested on a grid b* = b_0 < … < b_m = b_max, b_max ≥ b surely (ô and o are convex combinations of
the v_i): if b lay in (b_l, b_{l+1}], each tier would contradict its events, because its test uses b_l where it is
decreasing and b_{l+1} where it is increasing.

Events of one level, each one-sided; their probabilities sum to δ_j, the δ_j to δ (`FRACTIONS`):
  Z of either tier, V of either tier, S, M. V and S rest on Chernoff's bound in KL form for sums of [0, B] variables:
  Σ π b ≤ B μ(Σ X b / B; L) with probability ≥ 1 − e^−L, μ = `mean_upper`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MARGIN = 1 + 2.0**-10  # of the final comparison, for float32
OUTWARD = jnp.float32(1 + 1e-5)  # of every intermediate upper bound
GRID = 16  # intervals between b* and b_max
KAPPA = 15.0  # β = (ε M D)² / (KAPPA L_Z): efficiency only
TINY = 1e-30

# Shares of δ_j: Z and V of tier 1, Z, V and S of tier 2, M. Where either tier may prove the claim, both are paid for.
FRACTIONS = {
    ("value", "scalar"): {"z1": 0.5, "v1": 0.4, "m": 0.1},
    ("value", "both"): {"z1": 0.25, "v1": 0.2, "z2": 0.22, "v2": 0.13, "s2": 0.1, "m": 0.1},
    ("output", "scalar"): {"z1": 0.55, "v1": 0.45},
    ("output", "both"): {"z1": 0.28, "v1": 0.22, "z2": 0.25, "v2": 0.14, "s2": 0.11},
}


class Range(NamedTuple):
    """Deterministic facts of a head and level, [...]: light keys only enter through them.

    Attributes:
      tau: threshold τ.
      r0: offset of the sizes, > 0.
      size_max: ν_max ≥ ‖v − c0‖ over the pool.
      size_min: t_min = √(min ν² + r0²).
      radius: R ≥ ‖v − c0‖ over all attended keys.
    """

    tau: jax.Array
    r0: jax.Array
    size_max: jax.Array
    size_min: jax.Array
    radius: jax.Array


class Moments(NamedTuple):
    """Weighted sums over the sample S: Σ ω, Σ ω y [..., H], Σ ω ‖y‖², for one weight ω."""

    weight: jax.Array
    first: jax.Array
    second: jax.Array


def range_factor(x: jax.Array, known: Range) -> jax.Array:
    """rng(x) of certificate.md (RNG): g_i ‖v_i − o‖ ≤ τ rng(x) for every light key and x ≥ ‖o − c0‖."""
    x = x * OUTWARD
    by_offset = jnp.sqrt(1 + (x / known.r0) ** 2)
    return jnp.minimum(by_offset, (known.size_max + x) / known.size_min) * OUTWARD


def mean_upper(k: jax.Array, log_inverse: jax.Array) -> jax.Array:
    """μ(k; L): the root μ ≥ k of μ − k − k ln(μ / k) = L; L where k = 0.

    Newton's method from the right of the root of a convex function never crosses it, so every iterate is an upper
    bound.
    """
    safe = jnp.maximum(k, TINY)

    def newton(_, mu):
        excess = mu - k - k * jnp.log1p((mu - safe) / safe) - log_inverse
        slope = 1 - k / mu
        return jnp.where(k > TINY, mu - jnp.maximum(excess, 0) / jnp.maximum(slope, TINY), mu)

    start = k + jnp.sqrt(2 * k * log_inverse) + log_inverse
    return jnp.maximum(jax.lax.fori_loop(0, 8, newton, start), k) * OUTWARD


def bennett(y: jax.Array) -> jax.Array:
    """h(y) = (1 + y) ln(1 + y) − y for y ≥ 0, to 3e-5, which MARGIN covers."""
    series = y * y * (0.5 - y / 6)
    return jnp.where(y < 0.02, series, (1 + y) * jnp.log1p(y) - y)


def bennett_rate(x: jax.Array, variance: jax.Array, largest: jax.Array) -> jax.Array:
    """Rate R of Pinelis (1994, Thm 3.4): P(‖Σ ξ‖ ≥ x) ≤ 2 e^−R for independent centred ‖ξ‖ ≤ largest with Σ E‖ξ‖² ≤
    variance.

    R = (V / a²) h(a x / V) rises in x and falls in V and in a.
    """
    ratio = jnp.maximum(variance / largest, TINY) / largest  # a larger variance only lowers the rate
    return ratio * bennett(x / largest / ratio)


def mixture_bound(beta: jax.Array, trace: jax.Array, top: jax.Array, log_z: jax.Array, head_dim: int) -> jax.Array:
    """Method of mixtures over Delyon's inequality: ‖Z‖² ≤ (β + λ_max(A)) (2 L + H ln(1 + tr A / (H β))) w.p. ≥ 1 −
    e^−L.
    """
    return (beta + top) * (2 * log_z + head_dim * jnp.log1p(trace / (head_dim * beta)))


def claim(measure: str, epsilon: jax.Array, size: jax.Array, scale_squared: jax.Array) -> jax.Array:
    """b*: ‖ô − o‖ ≤ b* implies the measure's claim (certificate.md 6.4).

    Output: b ≤ ε ‖ô‖ / (1 + ε) implies b ≤ ε (‖ô‖ − b) ≤ ε ‖o‖. Value: also M ≥ ‖o‖, and M ≥ √scale_squared on event M.

    Args:
      measure: "value" or "output".
      epsilon: allowed relative error.
      size: ‖ô‖.
      scale_squared: lower bound of M²; unused for "output".
    """
    by_output = epsilon * size / (1 + epsilon)
    return by_output if measure == "output" else jnp.maximum(epsilon * jnp.sqrt(scale_squared), by_output)


def spread_upper(moments: Moments, center: jax.Array, b: jax.Array) -> jax.Array:
    """Largest Σ ω ‖v − o‖² over all o within b of ô: exact supremum, [..., GRID + 1] for b of that shape.

    Σ ω ‖y − p‖² = (Σ ω ‖y‖² − ‖Σ ω y‖² / Σ ω) + Σ ω · ‖p − mean‖², and the farthest p of the ball is ‖ô − mean‖ + b
    away.
    """
    weight = jnp.maximum(moments.weight, TINY)
    mean = moments.first / weight[..., None]
    scatter = jnp.maximum(moments.second * OUTWARD - (moments.first * mean).sum(-1), 0)
    far = _norm(center - mean)[..., None] + b
    spread = scatter[..., None] + moments.weight[..., None] * far**2
    return jnp.where(moments.weight[..., None] > 0, spread, 0) * OUTWARD


def grid(b_star: jax.Array, b_max: jax.Array) -> jax.Array:
    """b* = b_0 < … < b_m = b_max, [..., GRID + 1]: steps grow from 2 % to a factor of about 2 when b_max / b* is
    100.
    """
    power = (jnp.arange(GRID + 1) / GRID) ** 2
    ratio = jnp.maximum(b_max / jnp.maximum(b_star, TINY), 1)
    points = b_star[..., None] * ratio[..., None] ** power.reshape((1,) * b_star.ndim + (-1,)).astype(jnp.float32)
    return points.at[..., -1].set(jnp.maximum(b_max * OUTWARD, b_star))


def variance_upper(
    moments: Moments, center: jax.Array, b: jax.Array, known: Range, factor: float, log_inverse: jax.Array
) -> jax.Array:
    """Event V: upper bound, over all o within b of ô, of Σ_A π ω ‖v − o‖² from its sample sum.

    The terms lie in [0, factor · (τ rng)²]: factor 1 for ω = (1 − π) g² (tier 1), 2 for ω = (2 − π) g² (tier 2).
    """
    cap = jnp.maximum(factor * _largest(center, b, known) ** 2, TINY)
    return cap * mean_upper(spread_upper(moments, center, b) / cap, log_inverse[..., None])


def _largest(center: jax.Array, b: jax.Array, known: Range) -> jax.Array:
    """τ rng(x0 + b), the largest ‖g (v − o)‖ of a light key; [..., GRID + 1]."""
    wide = Range(*(x[..., None] for x in known))
    return wide.tau * range_factor(_norm(center)[..., None] + b, wide)


def scalar_shortfall(
    moments: Moments,
    center: jax.Array,
    denominator: jax.Array,
    b: jax.Array,
    known: Range,
    log_z: jax.Array,
    log_v: jax.Array,
) -> jax.Array:
    """Tier 1 (certificate.md 17): self-centred Bennett. Certified where the result is below 1.

    V = Σ_A π (1 − π) g² ‖v − o‖² and a = τ rng. On events V and Z a b in (b_l, b_{l+1}] implies
    rate(b_l D̂; V(b_{l+1}), a(b_{l+1})) ≤ L_Z + ln 2; certified iff every interval exceeds that.

    Args:
      moments: of ω = (1 − π) g².
      center: ô − c0, [..., H].
      denominator: D̂, [...].
      b: grid(b*, b_max), [..., GRID + 1].
      known: Range.
      log_z, log_v: ln(1 / probability) of the events Z and V, [...].

    Returns:
      (L_Z + ln 2) / smallest rate, [...]: how many times too small the sample is.
    """
    upper = b[..., 1:]
    size = _largest(center, upper, known)
    variance = variance_upper(moments, center, upper, known, 1.0, log_v)
    rate = bennett_rate(b[..., :-1] * denominator[..., None], variance, size)
    return (log_z + jnp.log(2.0)) * MARGIN / jnp.maximum(rate.min(-1), TINY)


def matrix_shortfall(
    first: Moments,
    second: Moments,
    scatter: jax.Array,
    center: jax.Array,
    denominator: jax.Array,
    b: jax.Array,
    known: Range,
    beta: jax.Array,
    log_z: jax.Array,
    log_v: jax.Array,
    log_s: jax.Array,
) -> jax.Array:
    """Tier 2 (certificate.md 6.2): Gaussian-mixture bound. Certified where the result is below 1.

    `mixture_bound` at a deterministic β with A = (C1 + C2) / 3: C1 = Σ_S (1 − π)² g² (v − o)(v − o)ᵀ seen,
    C2 = Σ_A π (2 − π) g² (v − o)(v − o)ᵀ unknown but deterministic. Event V bounds tr C2, event S λ_max(C2). The
    first factor F1 over b² falls in b and the second, F2, rises, so an interval is refuted by F1(b_l) F2(b_{l+1}) <
    (b_l D̂)².

    Args:
      first: Moments of ω = (1 − π)² g².
      second: Moments of ω = (2 − π) g².
      scatter: Σ_S (2 − π) g² y yᵀ, [..., H, H].
      center, denominator, b, known: as in `scalar_shortfall`.
      beta: smoothing candidates, [..., N]; with N > 1 every one pays ln N.
      log_z, log_v, log_s: ln(1 / probability) of the events Z, V and S, [...].

    Returns:
      The largest F1 F2 / (b D̂)² over the intervals, smallest over β, [...].
    """
    seen, unseen = eigenvalue_upper(second, scatter, center, b, known, log_s)
    top = (seen + unseen) / 3
    trace = (spread_upper(first, center, b) + variance_upper(second, center, b, known, 2.0, log_v)) / 3
    log_z = log_z + jnp.log(float(beta.shape[-1]))
    square = mixture_bound(
        beta[..., None, :], trace[..., 1:, None], top[..., :-1, None], log_z[..., None, None], center.shape[-1]
    )
    allowed = (b[..., :-1] * denominator[..., None]) ** 2
    return (square * MARGIN / jnp.maximum(allowed, TINY)[..., None]).max(-2).min(-1)


def eigenvalue_upper(
    second: Moments, scatter: jax.Array, center: jax.Array, b: jax.Array, known: Range, log_s: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Upper bounds of λ_max(C1), surely, and of λ_max(C2), event S; over all o within b of ô, [..., GRID + 1].

    C1 ≤ Ĉ2 / 2 since (1 − π)² ≤ (2 − π) / 2. Event S needs no dimension factor: the top eigenvector u of C2 is
    deterministic, so the Chernoff bound applies to Σ X (2 − π) g² (u·(v − o))² ≤ λ_max(Ĉ2). Minkowski moves λ_max
    from ô to o: √λ(o) ≤ √λ(ô) + b √Σω.

    Args:
      second: Moments of ω = (2 − π) g².
      scatter: Σ_S ω y yᵀ, [..., H, H].
      center, b, known, log_s: as in `matrix_shortfall`.
    """
    outer = second.first[..., :, None] * center[..., None, :]
    at_center = scatter - outer - jnp.swapaxes(outer, -1, -2)
    at_center = at_center + second.weight[..., None, None] * center[..., :, None] * center[..., None, :]
    top = largest_eigenvalue_upper(at_center)[..., None]
    moved = (jnp.sqrt(top) + b * jnp.sqrt(second.weight)[..., None]) ** 2 * OUTWARD
    cap = jnp.maximum(2 * _largest(center, b, known) ** 2, TINY)
    return 0.5 * moved, cap * mean_upper(moved / cap, log_s[..., None])


def largest_eigenvalue_upper(matrix: jax.Array) -> jax.Array:
    """(tr C⁸)^(1/8) ≥ λ_max(C) for a positive semidefinite C, [..., H, H] → [...]; two matrix products, no
    eigensolver.
    """
    trace = jnp.maximum(jnp.trace(matrix, axis1=-2, axis2=-1), TINY)
    power = matrix / trace[..., None, None]
    for _ in range(2):
        power = jnp.matmul(power, power, precision="highest")
    eighth = (power * power).sum((-2, -1)) ** 0.125
    return trace * jnp.minimum(eighth * OUTWARD + 1e-6, OUTWARD)


def value_scale_squared_lower(
    total: jax.Array,
    moments: tuple[jax.Array, jax.Array, jax.Array],
    denominator: jax.Array,
    cap: jax.Array,
    known: Range,
    log_m: jax.Array,
) -> jax.Array:
    """Event M (certificate.md 6.3): lower bound of μ = Σ a_i min(‖v_i‖², cap) ≤ M². Sums are in units of cap.

    E exp(X ln(1 + x) − π x) ≤ 1 with x = λ g (y − μ), λ = ½ / (g_max cap), gives Ĥ − μ D̂ ≤ λ (T2 − 2 μ T1 + μ² T0) +
    L / λ (ln(1 + x) ≥ x − x² for x ≥ −½); the smallest μ that satisfies it is the positive root of a quadratic.

    Args:
      total: Ĥ, Horvitz–Thompson sum of w min(‖v‖², cap) / cap, [...].
      moments: T0, T1, T2 = Σ_S g² (min(‖v‖², cap) / cap)^p.
      denominator: D̂.
      cap: deterministic truncation of ‖v‖², > 0.
      known: Range; g ≤ τ / t_min for light keys.
      log_m: ln(1 / probability).
    """
    t0, t1, t2 = moments
    lam = 0.5 / (known.tau / known.size_min * OUTWARD)
    constant = lam * t2 + log_m / lam - total
    slope = denominator - 2 * lam * t1
    root = jnp.sqrt(jnp.maximum(slope**2 - 4 * lam * t0 * constant, 0))
    # slope + root > 0 where constant < 0: root > |slope| if T0 > 0, and slope = D̂ > 0 if T0 = 0.
    low = -2 * constant / jnp.maximum(slope + root, TINY)
    return jnp.where(constant < 0, low, 0) * cap / (OUTWARD * OUTWARD)


def denominator_interval(
    base: jax.Array, errors: jax.Array, tau: jax.Array, widest: jax.Array, log_d: jax.Array, total
) -> tuple[jax.Array, jax.Array]:
    """Interval for D with the scan as control variate (certificate.md 8.3), z = w; two events of probability e^−log_d
    each.

    D = base + Σ_A (w − w̃), base = Σ_{R+B} w + Σ_A w̃. With e = (w − w̃) / π in [−τ (e^err − 1), τ) and
    E exp(X ln(1 + x) − π x) ≤ 1 for x = −l e and x = l' e:
        D ≤ base + (Σ_S −ln(1 − l e) + L) / l,    D ≥ base + (Σ_S ln(1 + l' e) − L) / l'.

    Args:
      base: [...].
      errors: e / τ of the light keys drawn, 0 elsewhere, [..., S].
      tau: threshold.
      widest: largest |s − scan| over the pool, deterministic.
      log_d: L.
      total: sums the last axis.

    Returns:
      (lower, upper), [...].
    """
    up = 0.9
    down = jnp.minimum(0.9 / jnp.maximum(jnp.expm1(widest), 1e-6), 4.0)
    upper = base + tau * (total(-jnp.log1p(-up * errors)) + log_d) / up
    lower = base + tau * (total(jnp.log1p(down[..., None] * errors)) - log_d) / down
    return lower, upper


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt((x * x).sum(-1)) * OUTWARD
