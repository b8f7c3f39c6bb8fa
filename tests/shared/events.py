"""The proven events of one level as failures per draw, and heads on which a wrong constant shows.

`bounds` is any module with the functions of `oracle_bounds`: the oracle itself, or the adapter of the product.
"""

import numpy as np

from tests.shared.families import FAMILIES
from tests.shared.oracle import predictions, smoothing, smoothing_betas
from tests.shared.oracle_bounds import Head

DELTA = 0.3  # of each event: large, so that a wrong constant shows
L = -np.log(DELTA)
SLACK = 1e-5  # float32 of the product


def family_head(name: str, S: int = 400, H: int = 4, exact: int = 8, norm_size: bool = True) -> Head:
    """The adversarial family as a head whose newest `exact` keys are always read."""
    family = FAMILIES[name](S, H)
    values = family.values.astype(np.float64)
    center = values.mean(0)
    nu = np.linalg.norm(values - center, axis=-1)
    weights = np.exp(family.scores - family.scores.max())
    r0 = smoothing(weights, nu)
    return Head(family.scores, values, np.arange(S) >= S - exact, center, nu, r0, norm_size)


def threshold(head: Head, expected: float) -> float:
    """The τ at which `expected` pool keys are read on average."""
    z = (head.w * head.t)[~head.exact]
    low, high = 1e-12 * z.max(), z.sum()
    for _ in range(200):
        middle = np.sqrt(low * high)
        low, high = (middle, high) if np.minimum(1, z / middle).sum() > expected else (low, middle)
    return float(middle)


def sphere(expected: float, axes: int, S: int = 400) -> tuple[Head, float]:
    """Opposite unit values, equal weights: o = c0, and each term of the variance sums is as large as its bound."""
    values = np.zeros((S, 4))
    values[np.arange(S), np.arange(S) // 2 % axes] = 1.0 - 2.0 * (np.arange(S) % 2)
    exact = np.arange(S) >= S - 8
    head = Head(np.zeros(S), values, exact, np.zeros(4), np.ones(S), 1e-3)
    return head, (head.t[~exact]).sum() / expected


def rare_range(expected: float, norm_size: bool, S: int = 400) -> tuple[Head, float]:
    """Three keys set the range and the variance, and `expected` of them are sampled; the others say nothing about it.

    With norm sizes the three are tiny (ν = 0, so g is huge) and far from o; with z = w their values are huge.
    """
    rare = np.isin(np.arange(S), (50, 150, 250))
    values = np.zeros((S, 4))
    values[:, 0] = np.where(rare, 0.0, 3.0) if norm_size else np.where(rare, 1000.0, 0.0)
    scores = np.zeros(S)
    if norm_size:
        scores[rare] = 2.0
    head = Head(scores, values, np.arange(S) >= S - 8, np.zeros(4), np.abs(values[:, 0]), 0.02, norm_size)
    return head, float((head.w * head.t)[rare].sum() / expected)


def truth(head: Head, tau: float) -> dict[str, np.ndarray]:
    """What the events are about, from the definitions."""
    light = head.split(tau)[1]
    pi, g = np.minimum(1, head.w * head.t / tau), tau / head.t
    y = np.where(light[:, None], head.values - head.output, 0.0)
    size = g**2 * (y**2).sum(-1)
    second = np.einsum("n,nh,nk->hk", pi * (2 - pi) * g**2, y, y)
    return {
        "light": light,
        "pi": pi,
        "step": g[:, None] * y,  # [S, H], g (v − o) of the light keys
        "variance": (pi * (1 - pi) * size).sum(),
        "trace": np.trace(second),
        "eigenvalue": np.linalg.eigvalsh(second)[-1],
        "second": second,
    }


def failures(bounds, head: Head, tau: float, exponentials: np.ndarray) -> dict[str, np.ndarray]:
    """Event -> bool [draws], True where its inequality is false at the true output; each has the budget DELTA."""
    draws, H = len(exponentials), head.values.shape[1]
    true, scales = truth(head, tau), predictions(head)
    y_cap = 4 * scales["M"] ** 2
    stats = bounds.level_statistics(head, tau, exponentials, y_cap)
    here = np.broadcast_to(head.output - head.center, (draws, H))
    still = np.zeros(draws)
    reach = tau * bounds.range_factor(stats, np.linalg.norm(here, axis=-1))

    inside = head.sampled(tau, exponentials).astype(np.float64)
    error = np.linalg.norm((inside - true["pi"] * true["light"]) @ true["step"], axis=-1)  # ‖Z_o‖
    r1 = inside * (1 - true["pi"]) ** 2
    observed = np.matmul(true["step"].T * r1[:, None, :], true["step"])
    A = (observed + true["second"]) / 3
    beta = smoothing_betas(0.1, scales["M"], scales["D"], L, 1)[0]
    mixture = bounds.mixture_bound(beta, np.trace(A, axis1=1, axis2=2), np.linalg.eigvalsh(A)[:, -1], L, H)
    mu = head.w @ np.minimum((head.values**2).sum(-1), y_cap) / head.w.sum()
    return {
        "Z1": bounds.bennett_rate(error, np.full(draws, true["variance"]), reach) > (L + np.log(2)) * (1 + SLACK),
        "V1": bounds.scalar_variance_upper(stats, here, still, L) < true["variance"] * (1 - SLACK),
        "Z2": error**2 > mixture * (1 + SLACK),
        "V2": bounds.trace_upper(stats, here, still, L)[1] < true["trace"] * (1 - SLACK),
        "S2": bounds.eigenvalue_upper(stats, here, still, L)[1] < true["eigenvalue"] * (1 - SLACK),
        "M": bounds.value_scale_lower(stats, L) > mu * (1 + SLACK),
    }


def denominator_failures(
    bounds, head: Head, scan: np.ndarray, scan_error: float, tau: float, exponentials: np.ndarray
) -> dict[str, np.ndarray]:
    """The same for the two sides of the interval for D."""
    lower, upper = bounds.denominator_interval(head, scan, scan_error, tau, exponentials, L)
    D = head.w.sum()
    return {"D lower": lower > D * (1 + SLACK), "D upper": upper < D * (1 - SLACK)}
