"""An independent float64 oracle of the estimator and its certificate, for one query head.

Notation as in the certificate: scores s, weights w = exp(s − c), sizes z = w t, inclusion probabilities
π = min(1, z/τ), E = −ln u the Exp(1) perturbations, g = w/π, c0 the value centre, ν_i ≥ ‖v_i − c0‖ the stored sizes.
Letters: S keys, H value dim, "..." any leading axes of independent draws of E.

A statement is proven where each event that it lists holds; an event of budget δ has L = ln(1/δ).
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

ELL = 0.5

Statistics = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Head:
    """What is fixed before the perturbations are drawn.

    Attributes:
      scores: [S]; −inf is weight 0.
      values: [S, H].
      exact: bool [S], keys that are always read (window, sinks).
      center: [H], c0.
      nu: [S], stored sizes, at least ‖v − c0‖.
      r0: smoothing of the size, t = sqrt(ν² + r0²).
      norm_size: False samples with z = w.
      reference: c; every D, τ and w is relative to exp(c). The largest score by default.
    """

    scores: np.ndarray
    values: np.ndarray
    exact: np.ndarray
    center: np.ndarray
    nu: np.ndarray
    r0: float
    norm_size: bool = True
    reference: float | None = None

    def __post_init__(self):
        gap = np.linalg.norm(self.values - self.center, axis=-1) - self.nu
        if gap.max() > 1e-9 * (1 + self.nu.max()):
            raise ValueError(f"nu must be at least ‖values − center‖, got one smaller by {gap.max():.3g}")
        if self.norm_size and not (self.t > 0).all():
            raise ValueError("every size must be positive, got r0 = 0 and a key with nu = 0: give a small r0")

    @property
    def w(self) -> np.ndarray:
        """[S], weights relative to the reference."""
        return np.exp(self.scores - (np.max(self.scores) if self.reference is None else self.reference))

    @property
    def t(self) -> np.ndarray:
        """[S], sizes of the values."""
        return np.sqrt(self.nu**2 + self.r0**2) if self.norm_size else np.ones_like(self.nu)

    @property
    def output(self) -> np.ndarray:
        """[H], dense attention."""
        return self.w @ self.values / self.w.sum()

    @property
    def pool(self) -> np.ndarray:
        """bool [S], the keys that are sampled: neither exact nor of weight 0."""
        return ~self.exact & (self.w > 0)

    def split(self, tau: float) -> tuple[np.ndarray, np.ndarray]:
        """Heavy and light pool keys at τ, bool [S] each."""
        heavy = self.w * self.t >= tau
        return self.pool & heavy, self.pool & ~heavy

    def sampled(self, tau: float, exponentials: np.ndarray) -> np.ndarray:
        """Light keys that enter at τ, bool [..., S]."""
        with np.errstate(divide="ignore"):
            return self.split(tau)[1] & (np.log(self.w * self.t) + exponentials >= np.log(tau))


# Tails.


def mu_upper(k: np.ndarray, L: float) -> np.ndarray:
    """Root μ ≥ k of μ − k − k ln(μ/k) = L; L at k = 0. μ ≤ mu_upper(Σ X b) has probability ≥ 1 − e^−L, b in [0, 1]."""
    k = np.asarray(k, np.float64)
    mu = k + np.sqrt(2 * k * L) + L
    for _ in range(100):  # convex and increasing in μ, so the iterates fall to the root
        ratio = np.divide(mu, k, out=np.ones_like(mu), where=k > 0)
        slope = np.where(k > 0, 1 - 1 / ratio, 1.0)
        step = np.divide(mu - k - k * np.log(ratio) - L, slope, out=np.zeros_like(mu), where=slope > 0)
        mu = np.maximum(mu - step, k)
        if np.all(step <= 1e-12 * mu):
            break
    return mu


def mu_lower(k: np.ndarray, L: float) -> np.ndarray:
    """The other root, μ ≤ k; 0 at k = 0. L > 0."""
    k = np.asarray(k, np.float64)
    safe = np.where(k > 0, k, 1.0)
    y = -(L / safe + np.sqrt(2 * L / safe))  # y = ln(μ/k) solves e^y − 1 − y = L/k; convex, and this start is below it
    for _ in range(100):
        step = (np.expm1(y) - y - L / safe) / np.expm1(y)
        y = y - step
        if np.all(-step <= 1e-12 * -y):
            break
    return np.where(k > 0, k * np.exp(y), 0.0)


def h(y: np.ndarray) -> np.ndarray:
    """(1 + y) ln(1 + y) − y."""
    return (1 + y) * np.log1p(y) - y


def bennett_rate(x: np.ndarray, variance: np.ndarray, bound: np.ndarray) -> np.ndarray:
    """Pinelis' rate R: P(‖Σξ‖ ≥ x) ≤ 2 exp(−R) for centred ξ with ‖ξ‖ ≤ bound and Σ E‖ξ‖² ≤ variance."""
    x, variance, bound = np.broadcast_arrays(*(np.asarray(a, np.float64) for a in (x, variance, bound)))
    some = (variance > 0) & (bound > 0)
    v, a = np.where(some, variance, 1.0), np.where(some, bound, 1.0)
    # No variance, no error: the rate of a positive error is infinite.
    return np.where(some, v / a**2 * h(a * x / v), np.where(x > 0, np.inf, 0.0))


def mixture_bound(beta: float, trace: np.ndarray, eigenvalue: np.ndarray, L: float, dim: int) -> np.ndarray:
    """(MIX): ‖Z‖² is at most this, with A of the given trace and largest eigenvalue."""
    return (beta + eigenvalue) * (2 * L + dim * np.log1p(trace / (dim * beta)))


# One level.


def level_statistics(head: Head, tau: float, exponentials: np.ndarray, y_cap: float = np.inf) -> Statistics:
    """The plain sums of one level, and the constants that the bounds need. Leading axes are those of `exponentials`.

    Suffix 0: r = (1−π) g² (tier 1), 1: (1−π)² g², 2: (2−π) g²; W = Σ r, m = Σ r y, q = Σ r‖y‖², Q = Σ r y y', over
    the light keys sampled, y = v − c0. T_p = Σ g² min(‖v‖², y_cap)^p. D_e, N_e, H_e: exact and heavy keys.
    """
    heavy, light = head.split(tau)
    certain = head.exact | heavy
    y, w = head.values - head.center, head.w
    capped = np.minimum((head.values**2).sum(-1), y_cap)
    out: Statistics = {
        "D_e": w[certain].sum(),
        "N_e": w[certain] @ y[certain],
        "H_e": w[certain] @ capped[certain],
    }
    inside = head.sampled(tau, exponentials)
    # Columns that no draw holds add nothing.
    some = np.flatnonzero(inside.reshape(-1, inside.shape[-1]).any(0))
    x, y, capped = inside[..., some].astype(np.float64), y[some], capped[some]
    pi, g = (w * head.t)[some] / tau, tau / head.t[some]
    norm = (y**2).sum(-1)
    out |= {"k": x.sum(-1), "D_s": x @ g, "N_s": (x * g) @ y, "H_s": x @ (g * capped)}
    for suffix, r in (("0", (1 - pi) * g**2), ("1", (1 - pi) ** 2 * g**2), ("2", (2 - pi) * g**2)):
        out |= {f"W{suffix}": x @ r, f"m{suffix}": (x * r) @ y, f"q{suffix}": x @ (r * norm)}
        if suffix != "0":
            out[f"Q{suffix}"] = np.matmul(y.T * (x * r)[..., None, :], y)
    out |= {f"T{p}": x @ (g**2 * capped**p) for p in range(3)}
    pool = head.pool
    out |= {
        "keys": heavy.sum() + out["k"],
        "tau": np.float64(tau),
        "y_cap": np.float64(y_cap),
        "r0": np.float64(head.r0 if head.norm_size else np.inf),
        "r_pool": head.nu[pool].max(initial=0.0),
        "t_min": head.t[pool].min(initial=np.inf),
        "r_all": head.nu[pool | head.exact].max(initial=0.0),
        "light": light.any(),
    }
    return out


def estimate(stats: Statistics) -> tuple[np.ndarray, np.ndarray]:
    """D̂ [...] and ô − c0 [..., H] (zero where D̂ = 0)."""
    d_hat = stats["D_e"] + stats["D_s"]
    n_hat = stats["N_e"] + stats["N_s"]
    return d_hat, np.divide(n_hat, d_hat[..., None], out=np.zeros_like(n_hat), where=d_hat[..., None] > 0)


def range_factor(stats: Statistics, x: np.ndarray) -> np.ndarray:
    """rng(x): g‖v − o‖ ≤ τ rng(‖o − c0‖) for every light key, sampled or not."""
    x = np.asarray(x, np.float64)
    largest = (stats["r_pool"] + x) / stats["t_min"]
    if np.isinf(stats["r0"]):  # z = w
        return largest
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.fmin(np.sqrt(1 + (x / stats["r0"]) ** 2), largest)


def _lift(x: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """A statistic [...] against radii [...] or [..., grid]."""
    return x[..., None] if np.ndim(radius) > np.ndim(x) > 0 else x


def _spread(stats: Statistics, suffix: str, offset: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Largest Σ r‖v − o‖² over the o − c0 within radius of offset (exact)."""
    W, m, q = (stats[name + suffix] for name in "Wmq")
    safe = np.where(W > 0, W, 1.0)
    rest = np.maximum(q - (m**2).sum(-1) / safe, 0.0)
    distance = np.linalg.norm(offset - m / safe[..., None], axis=-1)
    return _lift(np.where(W > 0, rest, 0.0), radius) + _lift(W, radius) * (_lift(distance, radius) + radius) ** 2


def _top(stats: Statistics, suffix: str, offset: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """At least λ_max of Σ r (v − o)(v − o)' over the same ball."""
    W, m, Q = (stats[name + suffix] for name in "WmQ")
    cross = m[..., :, None] * offset[..., None, :]
    about = Q - cross - np.swapaxes(cross, -1, -2) + W[..., None, None] * offset[..., :, None] * offset[..., None, :]
    root = np.sqrt(np.maximum(np.linalg.eigvalsh(about)[..., -1], 0.0))
    return (_lift(root, radius) + radius * _lift(np.sqrt(W), radius)) ** 2


def _unseen(scale: np.ndarray, seen: np.ndarray, L: float) -> np.ndarray:
    """scale × mu_upper(seen/scale): an upper bound of E of a sum of terms in [0, scale]."""
    safe = np.where(scale > 0, scale, 1.0)
    return np.where(scale > 0, safe * mu_upper(seen / safe, L), 0.0)


def _reach(stats: Statistics, offset: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """τ rng at the far side of the ball."""
    return stats["tau"] * range_factor(stats, _lift(np.linalg.norm(offset, axis=-1), radius) + radius)


def scalar_variance_upper(stats: Statistics, offset: np.ndarray, radius: np.ndarray, L: float) -> np.ndarray:
    """Upper bound of Σ_A π(1−π) g²‖v − o‖², the variance of Z_o (one event).

    As for the other bounds of this section: valid for every o with ‖o − c0 − offset‖ ≤ radius;
    offset [..., H]; radius [...] or [..., grid].
    """
    return _unseen(_reach(stats, offset, radius) ** 2, _spread(stats, "0", offset, radius), L)


def trace_upper(
    stats: Statistics, offset: np.ndarray, radius: np.ndarray, L: float, keep_q1: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """tr C1 (observed) and an upper bound of tr C2 = Σ_A π(2−π) g²‖v − o‖² (one event)."""
    seen = _spread(stats, "2", offset, radius)
    observed = _spread(stats, "1", offset, radius) if keep_q1 else seen / 2
    return observed, _unseen(2 * _reach(stats, offset, radius) ** 2, seen, L)


def eigenvalue_upper(
    stats: Statistics, offset: np.ndarray, radius: np.ndarray, L: float, keep_q1: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Upper bounds of λ_max(C1) (observed) and λ_max(C2) (one event)."""
    seen = _top(stats, "2", offset, radius)
    observed = _top(stats, "1", offset, radius) if keep_q1 else seen / 2
    return observed, _unseen(2 * _reach(stats, offset, radius) ** 2, seen, L)


def error_limit(stats: Statistics) -> np.ndarray:
    """‖ô − o‖ never exceeds this: both are convex combinations of the values."""
    offset = estimate(stats)[1]
    return stats["r_all"] + np.minimum(stats["r_all"], np.linalg.norm(offset, axis=-1))


def _grid(stats: Statistics, target: np.ndarray, ratio: float) -> np.ndarray:
    """Radii target = b_0 < b_1 < … = error_limit, [..., grid]."""
    limit = error_limit(stats)
    start = np.where(target > 0, np.minimum(target, limit), limit)
    spread = np.max(np.divide(limit, start, out=np.ones_like(limit), where=start > 0))
    steps = ratio ** np.arange(int(np.ceil(np.log(spread) / np.log(ratio))) + 2)
    return np.minimum(start[..., None] * steps, limit[..., None])


def _decide(stats: Statistics, target: np.ndarray, margin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    d_hat, _ = estimate(stats)
    sure = ~stats["light"] | (target >= error_limit(stats))
    margin = np.where(sure, np.inf, np.where((target > 0) & (d_hat > 0), margin, -1.0))
    return margin > 0, margin


def scalar_certifies(
    stats: Statistics, target: np.ndarray, *, L_z: float, L_v: float, ratio: float = 1.02
) -> tuple[np.ndarray, np.ndarray]:
    """Tier 1: is ‖ô − o‖ ≤ target proven? And the margin, the least rate over L_Z + ln 2, minus 1."""
    d_hat, offset = estimate(stats)
    b = _grid(stats, target, ratio)
    variance = scalar_variance_upper(stats, offset, b, L_v)
    rate = bennett_rate(b[..., :-1] * d_hat[..., None], variance[..., 1:], _reach(stats, offset, b)[..., 1:])
    return _decide(stats, target, rate.min(-1) / (L_z + np.log(2)) - 1)


def mixture_certifies(
    stats: Statistics,
    target: np.ndarray,
    *,
    betas: Sequence[float],
    L_z: float,
    L_v: float,
    L_s: float,
    keep_q1: bool = True,
    ratio: float = 1.02,
) -> tuple[np.ndarray, np.ndarray]:
    """Tier 2: the same from (MIX); several β share the budget of Z. Margin: least D̂² b²/(F1 F2), minus 1."""
    d_hat, offset = estimate(stats)
    b = _grid(stats, target, ratio)
    trace = sum(trace_upper(stats, offset, b, L_v, keep_q1)) / 3
    eigenvalue = sum(eigenvalue_upper(stats, offset, b, L_s, keep_q1)) / 3
    L, dim = L_z + np.log(len(betas)), offset.shape[-1]
    square = np.min([mixture_bound(beta, trace[..., 1:], eigenvalue[..., :-1], L, dim) for beta in betas], axis=0)
    ratios = np.divide(
        (d_hat[..., None] * b[..., :-1]) ** 2, square, out=np.full_like(square, np.inf), where=square > 0
    )
    return _decide(stats, target, ratios.min(-1) - 1)


def value_scale_lower(stats: Statistics, L: float) -> np.ndarray:
    """mu_low: a lower bound of M² = Σ a‖v‖² (one event)."""
    if not stats["light"] or stats["y_cap"] <= 0:
        gain, slack = 0.0, 0.0  # nothing is random
    else:
        scale = ELL / (stats["tau"] / stats["t_min"] * stats["y_cap"])  # λ: λ g |y − μ| ≤ ELL
        gain, slack = scale / (2 * (1 - ELL)), L / scale
    a = gain * stats["T0"]
    b = estimate(stats)[0] - 2 * gain * stats["T1"]
    c = gain * stats["T2"] + slack - stats["H_e"] - stats["H_s"]
    below = b + np.sqrt(np.maximum(b * b - 4 * a * c, 0.0))  # the positive root is −2c / below; a may be 0
    return np.divide(-2 * c, below, out=np.zeros_like(below), where=c < 0)


def target_radius(
    stats: Statistics, center: np.ndarray, *, epsilon: float, measure: str, mu_low: np.ndarray
) -> np.ndarray:
    """b*: an error of at most b* implies the claim of the measure."""
    norm = np.linalg.norm(estimate(stats)[1] + center, axis=-1)
    from_output = epsilon * norm / (1 + epsilon)
    return np.maximum(epsilon * np.sqrt(mu_low), from_output) if measure == "value" else from_output


def denominator_interval(
    head: Head, scan: np.ndarray, scan_error: np.ndarray, tau: float, exponentials: np.ndarray, L: float
) -> tuple[np.ndarray, np.ndarray]:
    """D_L and D_U [...] by the control variate of the scan (one event each); |scan − scores| ≤ scan_error, z = w."""
    heavy, light = head.split(tau)
    certain, w = head.exact | heavy, head.w
    rough = w * np.exp(np.subtract(scan, head.scores, where=head.pool, out=np.zeros_like(w)))
    spread = np.expm1(np.max(np.broadcast_to(scan_error, w.shape)[head.pool], initial=0.0))
    e = np.where(light, tau * (1 - rough / np.where(light, w, 1.0)), 0.0)
    inside = head.sampled(tau, exponentials).astype(np.float64)
    base, known = w[certain].sum() + rough[light].sum(), w[certain].sum()
    up = 0.9 / tau
    down = min(0.9 / (tau * spread), 4 / tau) if spread > 0 else 4 / tau
    upper = base + (inside @ -np.log1p(-up * e) + L) / up
    lower = base + (inside @ np.log1p(down * e) - L) / down
    grow = np.exp(np.broadcast_to(scan_error, w.shape))
    return np.maximum(lower, known + (rough / grow)[light].sum()), np.minimum(
        upper, known + (rough * grow)[light].sum()
    )
