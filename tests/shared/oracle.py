"""The whole op of the float64 oracle: predictions, levels, the stopping rule. Its bounds are in `oracle_bounds`.

Notation and array letters are those of `oracle_bounds`.
"""

from collections.abc import Sequence

import numpy as np

from tests.shared.oracle_bounds import (
    Head,
    denominator_interval,
    estimate,
    level_statistics,
    mixture_certifies,
    scalar_certifies,
    target_radius,
    value_scale_lower,
)

# How a level shares its budget between its events: (measure, tiers) -> event -> fraction.
FRACTIONS: dict[tuple[str, str], dict[str, float]] = {
    ("value", "scalar"): {"Z1": 0.50, "V1": 0.40, "M": 0.10},
    ("value", "matrix"): {"Z2": 0.45, "V2": 0.25, "S2": 0.20, "M": 0.10},
    ("value", "both"): {"Z1": 0.25, "V1": 0.20, "Z2": 0.22, "V2": 0.13, "S2": 0.10, "M": 0.10},
    ("output", "scalar"): {"Z1": 0.55, "V1": 0.45},
    ("output", "matrix"): {"Z2": 0.50, "V2": 0.28, "S2": 0.22},
    ("output", "both"): {"Z1": 0.28, "V1": 0.22, "Z2": 0.25, "V2": 0.14, "S2": 0.11},
    ("denominator", "scalar"): {"lower": 0.5, "upper": 0.5},
}
KAPPA = 15.0
TRUNCATION = 4.0  # y_cap over M_pred²


def smoothing(weights: np.ndarray, nu: np.ndarray, theta: float = 0.5) -> float:
    """The r0 of the product: r0² = θ × the weighted mean of ν² (at least a trace of it, if all ν are 0)."""
    return float(max(np.sqrt(theta * (weights @ nu**2) / weights.sum()), 1e-12))


def predictions(head: Head) -> dict[str, float]:
    """D, M and Z of the pool from the true weights, in the place of the scan's."""
    w, pool = head.w, head.pool
    second = w @ (head.values**2).sum(-1) / w.sum()
    return {"D": float(w.sum()), "M": float(np.sqrt(second)), "Z": float((w * head.t)[pool].sum())}


def thresholds(z_pred: float, n_pool: int, epsilon: float, ratio: float = 2.0) -> np.ndarray:
    """τ_j = Z_pred / m_j, m_j = m_0 2^(j/ratio) < n_pool/2, m_0 = max(16, 0.3/ε²); none where dense is cheaper."""
    m0 = max(16.0, 0.3 / epsilon**2)
    count = max(0, int(np.ceil(ratio * np.log2(n_pool / 2 / m0)))) if n_pool else 0
    return z_pred / (m0 * 2.0 ** (np.arange(count) / ratio))


def smoothing_betas(epsilon: float, m_pred: float, d_pred: float, L_z: float, count: int) -> list[float]:
    """β of the mixture, and for count > 1 its quarters."""
    return [(epsilon * m_pred * d_pred) ** 2 / (KAPPA * L_z) / 4.0**i for i in range(count)]


def attend(
    head: Head,
    exponentials: np.ndarray,
    taus: Sequence[float],
    *,
    epsilon: float,
    delta: float,
    d_pred: float,
    m_pred: float,
    measure: str = "value",
    tiers: str = "scalar",
    fractions: dict[str, float] | None = None,
    keep_q1: bool = True,
    ratio: float = 1.02,
    levels: Sequence[int] | None = None,
    scan: np.ndarray | None = None,
    scan_error: np.ndarray | None = None,
) -> dict:
    """Stops at the first level of `levels` (all, in order, by default) that certifies; else computes densely.

    Each of the len(taus) levels has the budget delta / len(taus), visited or not. Measure "denominator" needs
    `scan` and `scan_error`, and a head with z = w.

    Returns: output [H], log_normalizer (of the estimate of D, relative to the reference), level (−1 if
      dense), keys (pool keys read), certified, exact, tier, target (b*), margins {tier: margin} of the last level seen,
      mu_low, error (of the measure's own quantity), allowed (ε × the measure's true scale).
    """
    n_pool, true = int(head.pool.sum()), head.output
    d_true = head.w.sum()
    scale = {
        "value": np.sqrt(head.w @ (head.values**2).sum(-1) / d_true),
        "output": np.linalg.norm(true),
        "denominator": d_true,
    }[measure]
    result = {"allowed": epsilon * scale, "margins": {}, "target": np.nan, "mu_low": 0.0, "tier": None}
    f = FRACTIONS[measure, tiers] if fractions is None else fractions
    L = {event: np.log(len(taus) / (delta * share)) for event, share in f.items()} if len(taus) else {}
    for level in range(len(taus)) if levels is None else levels:
        tau = taus[level]
        stats = level_statistics(head, tau, exponentials, TRUNCATION * m_pred**2)
        if stats["keys"] >= n_pool / 2:
            break
        d_hat, offset = estimate(stats)
        output = head.center + offset
        error = np.linalg.norm(output - true)
        if measure == "denominator":
            lower, upper = denominator_interval(head, scan, scan_error, tau, exponentials, L["upper"])
            d_hat = 2 * lower * upper / (lower + upper)
            done = {"scan": lower > 0 and upper <= lower * (1 + epsilon) / (1 - epsilon)}
            error = abs(d_hat - d_true)
        else:
            mu_low = value_scale_lower(stats, L["M"]) if measure == "value" else np.float64(0.0)
            target = target_radius(stats, head.center, epsilon=epsilon, measure=measure, mu_low=mu_low)
            done, margins = {}, {}
            if "Z1" in f:
                done["scalar"], margins["scalar"] = scalar_certifies(
                    stats, target, L_z=L["Z1"], L_v=L["V1"], ratio=ratio
                )
            if "Z2" in f:
                betas = smoothing_betas(epsilon, m_pred, d_pred, L["Z2"], 1 if measure == "value" else 4)
                done["matrix"], margins["matrix"] = mixture_certifies(
                    stats, target, betas=betas, L_z=L["Z2"], L_v=L["V2"], L_s=L["S2"], keep_q1=keep_q1, ratio=ratio
                )
            result |= {"margins": margins, "target": target, "mu_low": mu_low}
        if any(done.values()):
            return result | {
                "output": output,
                "log_normalizer": np.log(d_hat),
                "level": level,
                "keys": int(stats["keys"]),
                "certified": True,
                "exact": False,
                "tier": next(name for name, yes in done.items() if yes),
                "error": error,
            }
    return result | {
        "output": true,
        "log_normalizer": np.log(d_true),
        "level": -1,
        "keys": n_pool,
        "certified": True,
        "exact": True,
        "error": 0.0,
    }
