"""The certificate of the certified sparse attention paper, as a rival. **Our reconstruction**, not its code.

Only a summary of the paper was at hand; where it left a choice, the one that reads fewer keys is taken.
With weights w_i = exp(s_i − max s), the grid τ_j = 2^(−j/r), j = 0 … J, inclusion π_i = min(1, w_i/τ), heavy keys
B = {w_i ≥ τ} read exactly, S the light keys A that the perturbations let in, k = |S|, and
δ_j = δ / ((J + 1) e), L = ln(1/δ_j), e the number of events of a level:

    D_L, D_U = D_RB + τ μ_∓(k; L)                        roots of μ − k − k ln(μ/k) = L, two events
    G_U = τ R² μ_+(Σ_S ‖v − c‖² / R²; L)                 R the largest ‖v − c‖ of the pool, one event
    ζ = sqrt(2 τ G_U L₂) + τ R L₂ / 3, L₂ = ln(2/δ_j)    Pinelis (1994) Theorem 3.4, one event
    β = max{ (ζ + ‖ô − c‖ (D̂ − D_L)) / D_L, (ζ + ‖ô − c‖ (D_U − D̂)) / D_U }  ≥ ‖ô − o‖
    M_L² = (H_RB + τ v² μ_−(Σ_S ‖v‖² / v²; L)) / D_U     v the largest ‖v‖ of the pool, one event (value only)

A level certifies if β ≤ ε M_L ("value", e = 5), β ≤ ε (‖ô‖ − β) ("output", e = 4), or max(D̂ − D_L, D_U − D̂) ≤ ε D_L
("denominator", e = 2). The centre c must not depend on this step's sample.
"""

from typing import Literal, TypedDict

import numpy as np

RESOLUTION = 2  # r, levels per halving of τ
EVENTS = {"value": 5, "output": 4, "denominator": 2}


class PaperResult(TypedDict):
    """Result of `paper_attend`.

    Attributes:
      output: float64 [H].
      keys_read: pool keys whose key and value were read (all of them where exact).
      level: j of the level that certified; −1 where exact.
      certified: the claim of the measure holds (always: a head that does not certify is computed exactly).
      exact: computed densely.
      error_bound: bound of ‖output − o‖, or of |D̂ − D| / D for the denominator; 0 where exact.
    """

    output: np.ndarray
    keys_read: int
    level: int
    certified: bool
    exact: bool
    error_bound: float


def paper_attend(
    scores: np.ndarray,
    values: np.ndarray,
    exact_mask: np.ndarray,
    uniforms: np.ndarray,
    *,
    epsilon: float,
    delta: float,
    measure: Literal["value", "output", "denominator"] = "value",
    centre: Literal["heavy", "mean"] | np.ndarray = "heavy",
) -> PaperResult:
    """Attention of one query head under the paper's certificate, in float64.

    Levels are tried in order; the head is computed densely as soon as one would read half of the pool, as in certjax.
    All scores are taken as known: the scan that finds the candidates is not modelled.

    Args:
      scores: [S], q · k × scale; −inf is a masked key.
      values: [S, H].
      exact_mask: bool [S], keys that are always read (window and sinks) and not counted.
      uniforms: [S], independent uniforms in (0, 1], one per key.
      epsilon: target, in (0, 1).
      delta: probability of a larger error, in (0, 1).
      measure: what the error is relative to: M ("value"), ‖o‖ ("output"), or the error of the denominator.
      centre: "heavy", the mean over the keys that the level reads for sure, (N_R + N_B) / (D_R + D_B), or "mean" where
        there are none; "mean", the plain mean of all values; or [H], a vector fixed before the uniforms were drawn.

    Returns:
      A `PaperResult`.

    Raises:
      ValueError: a shape, a range or the name of the measure is wrong, or an input is NaN.

    Cost: O(S H) time and memory a head, and O(S) a level.
    Source: section 3 of certjax's notes on the certificate, after the paper.
    """
    scores, values, uniforms = (np.asarray(x, np.float64) for x in (scores, values, uniforms))
    exact_mask = np.asarray(exact_mask, bool)
    _check(scores, values, exact_mask, uniforms, epsilon, delta, measure)
    middle = None if isinstance(centre, str) and centre == "heavy" else _fixed_centre(values, centre)
    pool = ~exact_mask
    n_pool = int(pool.sum())
    with np.errstate(invalid="ignore"):  # all masked: −inf − (−inf)
        w = np.where(np.isneginf(scores), 0.0, np.exp(scores - scores.max()))
    norm2 = (values**2).sum(-1)
    # The largest weight is 1, so from τ = 2/n_pool on a sample holds half of the pool where the pool has that key.
    levels = int(np.ceil(RESOLUTION * np.log2(max(n_pool, 2) / 2))) + 1
    L = np.log(levels * EVENTS[measure] / delta)
    for level in range(levels):
        tau = 2.0 ** (-level / RESOLUTION)
        heavy = pool & (w >= tau)
        sampled = pool & ~heavy & (uniforms * tau <= w)
        keys = int(heavy.sum() + sampled.sum())
        if keys >= n_pool / 2:
            break
        certain = exact_mask | heavy
        d_certain, n_certain, k = w[certain].sum(), w[certain] @ values[certain], float(sampled.sum())
        d_hat = d_certain + tau * k
        d_low, d_up = d_certain + tau * _kl_lower(k, L), d_certain + tau * _kl_upper(k, L)
        if d_low <= 0:
            continue
        output = (n_certain + tau * values[sampled].sum(0)) / d_hat
        if measure == "denominator":
            bound = max(d_hat - d_low, d_up - d_hat) / d_low
            done = bound <= epsilon
        else:
            c = middle
            if c is None:
                c = n_certain / d_certain if d_certain > 0 else values.mean(0)
            bound = _error_bound(values, pool, sampled, c, output, tau, L, (d_low, d_hat, d_up))
            if measure == "value":
                v2 = norm2[pool].max()
                seen = tau * v2 * _kl_lower(norm2[sampled].sum() / v2, L) if v2 > 0 else 0.0
                done = bound <= epsilon * np.sqrt((w[certain] @ norm2[certain] + seen) / d_up)
            else:
                done = bound <= epsilon * (np.linalg.norm(output) - bound)
        if done:
            return PaperResult(
                output=output, keys_read=keys, level=level, certified=True, exact=False, error_bound=float(bound)
            )
    dense = w @ values / w.sum() if w.any() else np.zeros(values.shape[1])
    return PaperResult(output=dense, keys_read=n_pool, level=-1, certified=True, exact=True, error_bound=0.0)


def _error_bound(
    values: np.ndarray,
    pool: np.ndarray,
    sampled: np.ndarray,
    c: np.ndarray,
    output: np.ndarray,
    tau: float,
    L: float,
    denominator: tuple[float, float, float],
) -> float:
    """β, with the denominator's lower bound, estimate and upper bound."""
    d_low, d_hat, d_up = denominator
    far2 = ((values - c) ** 2).sum(-1)
    r2 = far2[pool].max()
    L2 = L + np.log(2)
    zeta = 0.0
    if r2 > 0:
        g_up = tau * r2 * _kl_upper(far2[sampled].sum() / r2, L)
        zeta = np.sqrt(2 * tau * g_up * L2) + tau * np.sqrt(r2) * L2 / 3
    away = float(np.linalg.norm(output - c))
    return max((zeta + away * (d_hat - d_low)) / d_low, (zeta + away * (d_up - d_hat)) / d_up)


def _kl_upper(k: float, L: float) -> float:
    """Root μ ≥ k of μ − k − k ln(μ/k) = L, by Newton from above: convex, so it never undershoots."""
    mu = k + np.sqrt(2 * k * L) + L
    if k <= 0:
        return L
    for _ in range(60):
        step = (mu - k - k * np.log(mu / k) - L) / (1 - k / mu)
        mu = max(mu - step, k)
        if step <= 1e-12 * mu:
            break
    return float(mu)


def _kl_lower(k: float, L: float) -> float:
    """The other root, μ ≤ k, by Newton in y = ln(μ/k) from below; 0 at k = 0."""
    if k <= 0:
        return 0.0
    y = -(L / k + np.sqrt(2 * L / k))
    for _ in range(60):
        step = (np.expm1(y) - y - L / k) / np.expm1(y)
        y -= step
        if step >= 1e-12 * y:
            break
    return float(k * np.exp(y))


def _fixed_centre(values: np.ndarray, centre: str | np.ndarray) -> np.ndarray:
    if isinstance(centre, str):
        if centre != "mean":
            raise ValueError(f'centre must be "heavy", "mean" or an array [H], got {centre!r}')
        return values.mean(0)
    vector = np.asarray(centre, np.float64)
    if vector.shape != values.shape[1:]:
        raise ValueError(f"centre must have the shape {values.shape[1:]} of a value, got {vector.shape}")
    return vector


def _check(
    scores: np.ndarray,
    values: np.ndarray,
    exact_mask: np.ndarray,
    uniforms: np.ndarray,
    epsilon: float,
    delta: float,
    measure: str,
) -> None:
    if scores.ndim != 1 or scores.size == 0 or values.ndim != 2:
        raise ValueError(f"scores must be [S] and values [S, H] with S > 0, got {scores.shape} and {values.shape}")
    for name, x in (("values", values), ("exact_mask", exact_mask), ("uniforms", uniforms)):
        if x.shape[0] != scores.size or (name != "values" and x.ndim != 1):
            raise ValueError(f"{name} must have one row for each of the {scores.size} scores, got shape {x.shape}")
    if np.isnan(scores).any() or np.isposinf(scores).any() or not np.isfinite(values).all():
        raise ValueError("scores must be finite or -inf and values finite, got NaN or inf")
    if not ((uniforms > 0) & (uniforms <= 1)).all():
        raise ValueError("uniforms must lie in (0, 1]; a 0 would let a key in at every threshold")
    for name, value in (("epsilon", epsilon), ("delta", delta)):
        if not 0 < value < 1:
            raise ValueError(f"{name} must lie in (0, 1), got {value}")
    if measure not in EVENTS:
        raise ValueError(f"measure must be one of {sorted(EVENTS)}, got {measure!r}")
