"""The oracle against plainer mathematics: roots, suprema by search, end-to-end violations. It judges the product."""

import dataclasses
import functools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
import scipy.stats

from tests.shared import events, oracle, oracle_bounds
from tests.shared.families import FAMILIES

CONFIGURATIONS = [key for key in oracle.FRACTIONS if key[0] != "denominator"]
CLAIM = 1e-6


@functools.cache
def level(family, norm_size=True, draws=6):
    head = events.family_head(family, norm_size=norm_size)
    tau = events.threshold(head, 60)
    E = np.random.default_rng(1).exponential(size=(draws, 400))
    return head, tau, E, oracle_bounds.level_statistics(head, tau, E, 4 * oracle.predictions(head)["M"] ** 2)


def attend(head, seed, *, epsilon=0.3, delta=0.5, taus=None, **options):
    scales = oracle.predictions(head)
    E = np.random.default_rng([9, seed]).exponential(size=head.scores.size)
    if taus is None:
        taus = oracle.thresholds(scales["Z"], int((~head.exact).sum()), epsilon)
    return oracle.attend(head, E, taus, epsilon=epsilon, delta=delta, d_pred=scales["D"], m_pred=scales["M"], **options)


@pytest.mark.parametrize("measure_tiers", oracle.FRACTIONS)
def test_fractions_sum_to_one(measure_tiers):
    assert sum(oracle.FRACTIONS[measure_tiers].values()) == pytest.approx(1.0)


@hypothesis.given(k=st.floats(1e-3, 1e5), L=st.floats(1e-2, 60))
def test_tails_solve_their_equation(k, L):
    low, high = (float(f(k, L)) for f in (oracle_bounds.mu_lower, oracle_bounds.mu_upper))
    assert low < k < high
    for mu in (low, high):
        if mu > 1e-250:
            np.testing.assert_allclose(mu - k - k * np.log(mu / k), L, rtol=1e-6, atol=1e-9 * k)
    if 1e-4 < L / k < 500:  # where lambertw neither cancels nor underflows
        np.testing.assert_allclose(high, -k * scipy.special.lambertw(-np.exp(-1 - L / k), -1).real, rtol=1e-6)
        np.testing.assert_allclose(low, -k * scipy.special.lambertw(-np.exp(-1 - L / k), 0).real, rtol=1e-6)


def test_tails_of_nothing():
    assert oracle_bounds.mu_upper(0.0, 2.5) == 2.5
    assert oracle_bounds.mu_lower(0.0, 2.5) == 0.0


@pytest.mark.parametrize("k", [0, 1, 5, 40])
def test_upper_tail_is_a_poisson_bound(k):
    # At the mean mu_upper(k, L) a count of at most k has probability at most e^−L.
    for L in (0.5, 2.0, 9.0):
        assert scipy.stats.poisson.cdf(k, oracle_bounds.mu_upper(k, L)) <= np.exp(-L) * (1 + 1e-9)
        if k:
            assert scipy.stats.poisson.sf(k - 1, oracle_bounds.mu_lower(k, L)) <= np.exp(-L) * (1 + 1e-9)


def test_mixture_inequality_for_all_reals():
    x = np.linspace(-60, 60, 200_001)  # exp(x − x²/6) ≤ 1 + x + x²/3 is what (MIX) rests on
    assert (np.exp(x - x**2 / 6) <= 1 + x + x**2 / 3 + 1e-12).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("suffix", ["0", "1", "2"])
def test_spread_is_the_supremum_on_the_ball(family, suffix):
    head, tau, E, stats = level(family)
    light = head.sampled(tau, E)
    pi, g = np.minimum(1, head.w * head.t / tau), tau / head.t
    r = {"0": 1 - pi, "1": (1 - pi) ** 2, "2": 2 - pi}[suffix] * g**2 * light
    offset = oracle_bounds.estimate(stats)[1]
    radius = np.full(len(offset), 0.3 * head.r0)
    bound = oracle_bounds._spread(stats, suffix, offset, radius)
    rng = np.random.default_rng(2)
    best = np.zeros(len(offset))
    for _ in range(120):
        direction = rng.normal(size=offset.shape)
        o = offset + radius[:, None] * direction / np.linalg.norm(direction, axis=-1, keepdims=True)
        y = head.values - head.center - o[:, None]
        best = np.maximum(best, (r * (y**2).sum(-1)).sum(-1))
        if suffix != "0":
            C = np.einsum("bn,bnh,bnk->bhk", r, y, y)
            top = oracle_bounds._top(stats, suffix, offset, radius)
            assert (np.linalg.eigvalsh(C)[:, -1] <= top * (1 + 1e-9)).all()
    assert (best <= bound * (1 + 1e-9)).all()
    assert (best >= 0.8 * bound).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_dropping_q1_is_valid(family):
    head, _, _, stats = level(family)
    offset = oracle_bounds.estimate(stats)[1]
    radius = np.full(len(offset), 0.1 * head.r0)
    for bound in (oracle_bounds.trace_upper, oracle_bounds.eigenvalue_upper):
        kept, dropped = (bound(stats, offset, radius, 1.0, keep)[0] for keep in (True, False))
        assert (kept <= dropped * (1 + 1e-9)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_value_scale_is_the_root(family):
    head, tau, _, stats = level(family)
    y_cap = 4 * oracle.predictions(head)["M"] ** 2
    mu = oracle_bounds.value_scale_lower(stats, 1.0)
    scale = 0.5 / (tau / head.t[~head.exact].min() * y_cap)
    gap = stats["H_e"] + stats["H_s"] - mu * (stats["D_e"] + stats["D_s"])
    allowed = scale * (stats["T2"] - 2 * mu * stats["T1"] + mu**2 * stats["T0"]) + 1.0 / scale
    found = mu > 0
    np.testing.assert_allclose(gap[found], allowed[found], rtol=1e-8)
    assert (gap[~found] <= allowed[~found]).all()


@pytest.mark.parametrize("norm_size", [True, False])
def test_samples_are_nested_and_unbiased(norm_size):
    head, tau, _, _ = level("peaked", norm_size)
    E = np.random.default_rng(6).exponential(size=(4000, 400))
    certain = head.exact | head.split(tau)[0]
    fewer, more = (certain | head.sampled(t, E) | head.split(t)[0] for t in (tau, tau / 2))
    assert not (fewer & ~more).any()
    stats = oracle_bounds.level_statistics(head, tau, E)
    for name, want in (("D", head.w.sum()), ("N", head.w @ (head.values - head.center))):
        got = stats[f"{name}_e"] + stats[f"{name}_s"]
        assert (np.abs(got.mean(0) - want) <= 5 * got.std(0) / np.sqrt(len(E))).all()


def test_draws_equal_single_calls():
    head, tau, E, stats = level("pareto")
    goal = np.full(len(E), 0.5 * oracle.predictions(head)["M"])
    budget = {"betas": [1.0, 0.25], "L_z": 1.0, "L_v": 2.0, "L_s": 3.0}
    _, many = oracle_bounds.mixture_certifies(stats, goal, **budget)
    _, many_scalar = oracle_bounds.scalar_certifies(stats, goal, L_z=1.0, L_v=2.0)
    for i in range(3):
        one = oracle_bounds.level_statistics(head, tau, E[i], float(stats["y_cap"]))
        np.testing.assert_allclose(oracle_bounds.mixture_certifies(one, goal[i], **budget)[1], many[i], rtol=1e-9)
        margin = oracle_bounds.scalar_certifies(one, goal[i], L_z=1.0, L_v=2.0)[1]
        np.testing.assert_allclose(margin, many_scalar[i], rtol=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("measure_tiers", CONFIGURATIONS, ids="-".join)
def test_no_violation_end_to_end(family, measure_tiers):
    measure, tiers = measure_tiers
    head = events.family_head(family, S=1200, H=4)
    rng = np.random.default_rng(4)
    for _ in range(6):
        scales = oracle.predictions(head)
        d_pred, m_pred = scales["D"] * rng.lognormal(0, 0.3), scales["M"] * rng.lognormal(0, 0.3)
        taus = oracle.thresholds(scales["Z"], 1192, 0.4)
        E = rng.exponential(size=1200)
        result = oracle.attend(
            head, E, taus, epsilon=0.4, delta=0.9, d_pred=d_pred, m_pred=m_pred, measure=measure, tiers=tiers
        )
        assert result["error"] <= result["allowed"] * (1 + CLAIM)
        assert result["exact"] == (result["level"] == -1)
        assert result["mu_low"] <= oracle.predictions(head)["M"] ** 2 * (1 + CLAIM)


def test_most_families_are_certified_without_reading_all():
    sparse = [f for f in FAMILIES if attend(events.family_head(f, S=1500, H=16), 0)["keys"] < 700]
    assert len(sparse) >= 9


def test_denominator_measure_uses_the_scan():
    head = dataclasses.replace(events.family_head("peaked", S=1200), norm_size=False)
    keys = []
    for error in (0.02, 0.3, 1.5):
        scan = head.scores + np.random.default_rng(0).uniform(-error, error, 1200)
        result = attend(head, 0, epsilon=0.1, measure="denominator", scan=scan, scan_error=error)
        assert result["error"] <= result["allowed"]
        keys.append(result["keys"])
    assert keys == sorted(keys)
    assert keys[0] < keys[-1]


def test_skipped_levels_keep_their_budget():
    head = events.family_head("flat", S=1200)
    everything = attend(head, 3)
    jumped = attend(head, 3, levels=[everything["level"]])
    assert jumped["level"] == everything["level"]
    assert jumped["margins"] == everything["margins"]


def test_nothing_to_sample_is_exact():
    head = events.family_head("flat", S=1200)
    everything = attend(dataclasses.replace(head, exact=np.ones(1200, bool)), 0, taus=[])
    assert everything["exact"]
    assert everything["keys"] == 0
    np.testing.assert_allclose(everything["output"], head.output)
    # All keys of the pool heavy, or of weight 0: certified with no event.
    masked = dataclasses.replace(head, scores=np.where(head.exact, 0.0, -np.inf))
    result = attend(masked, 0, taus=[1.0])
    assert result["keys"] == 0
    np.testing.assert_allclose(result["output"], masked.output)


def test_sizes_are_checked():
    head = events.family_head("flat")
    with pytest.raises(ValueError, match="nu must be at least"):
        dataclasses.replace(head, nu=0.9 * head.nu)
    with pytest.raises(ValueError, match="every size must be positive"):
        dataclasses.replace(head, values=np.zeros((400, 4)), nu=np.zeros(400), center=np.zeros(4), r0=0.0)
