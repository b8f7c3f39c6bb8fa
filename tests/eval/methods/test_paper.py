import functools

import chex
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import scipy.special
from absl.testing import parameterized

from certjax.eval.methods import paper, paper_attend
from tests.shared.families import FAMILIES

MEASURES = ("value", "output", "denominator")


@functools.cache
def head(name, S=1500, H=8):
    family = FAMILIES[name](S, H)
    return family.scores, family.values.astype(np.float64), np.arange(S) >= S - 8


def uniforms(seed, S=1500):
    return 1.0 - np.random.default_rng(seed).random(S)


def true_error(result, scores, values, measure):
    """The error, and the scale it is relative to."""
    w = np.exp(scores - scores.max())
    output = w @ values / w.sum()
    scale = np.sqrt(w @ (values**2).sum(-1) / w.sum()) if measure == "value" else np.linalg.norm(output)
    return np.linalg.norm(result["output"] - output), scale


class PaperTest(chex.TestCase):
    @parameterized.product(family=list(FAMILIES), measure=MEASURES, centre=("heavy", "mean"))
    def test_error_stays_below_its_bound(self, family, measure, centre):
        scores, values, exact = head(family)
        for seed in range(5):
            result = paper_attend(
                scores, values, exact, uniforms(seed), epsilon=0.3, delta=0.1, measure=measure, centre=centre
            )
            assert result["certified"]
            assert result["exact"] == (result["keys_read"] == (~exact).sum()) == (result["level"] == -1)
            if measure == "denominator":
                continue  # its error is not in the result; test_levels_are_the_estimator checks it
            error, scale = true_error(result, scores, values, measure)
            assert error <= result["error_bound"] + 1e-12 * scale
            if not result["exact"]:
                assert result["error_bound"] <= 0.3 * scale

    @parameterized.product(measure=MEASURES)
    def test_levels_are_the_estimator(self, measure):
        # Rebuilds the sample of the level that was reported.
        scores, values, exact = head("peaked")
        u, w = uniforms(3), np.exp(scores - scores.max())
        result = paper_attend(scores, values, exact, u, epsilon=0.2, delta=0.1, measure=measure)
        assert not result["exact"]
        tau = 2.0 ** (-result["level"] / 2)
        read = (w >= tau) | (u <= w / tau)
        g = np.where(exact, w, np.where(read, np.maximum(w, tau), 0.0))
        chex.assert_trees_all_close(result["output"], g @ values / g.sum(), rtol=1e-12)
        assert result["keys_read"] == (read & ~exact).sum()
        if measure == "denominator":
            assert abs(g.sum() - w.sum()) <= result["error_bound"] * w.sum()
            assert result["error_bound"] <= 0.2

    def test_smaller_targets_read_more(self):
        scores, values, exact = head("peaked")
        keys = [
            paper_attend(scores, values, exact, uniforms(1), epsilon=e, delta=d)["keys_read"]
            for e, d in ((0.4, 0.1), (0.2, 0.1), (0.1, 0.1), (0.1, 1e-6))
        ]
        assert keys == sorted(keys)
        assert keys[0] < keys[-1]

    def test_nearly_equal_scores_are_computed_exactly(self):
        scores, values, exact = head("equal_keys")
        result = paper_attend(scores, values, exact, uniforms(0), epsilon=0.2, delta=0.1)
        assert result["exact"]
        assert result["error_bound"] == 0.0
        chex.assert_trees_all_close(result["output"], values.mean(0), rtol=1e-9)

    def test_masked_keys_are_never_read(self):
        scores, values, exact = head("peaked")
        masked = np.where(np.arange(scores.size) % 2, -np.inf, scores)
        wild = np.where(np.isneginf(masked)[:, None], 1e3, values)
        a = paper_attend(masked, values, exact, uniforms(0), epsilon=0.3, delta=0.1, centre=np.zeros(8))
        assert not a["exact"]
        w = np.where(np.isneginf(masked), 0, np.exp(scores))
        b = paper_attend(masked, wild, exact, uniforms(0), epsilon=0.3, delta=0.1, centre=np.zeros(8))
        chex.assert_trees_all_close(b["output"], w @ wild / w.sum(), atol=0.3 * np.abs(values).max())
        empty = paper_attend(
            np.full(9, -np.inf), np.ones((9, 2)), np.arange(9) > 7, uniforms(0, 9), epsilon=0.3, delta=0.1
        )
        chex.assert_trees_all_equal(empty["output"], np.zeros(2))

    def test_all_keys_exact(self):
        scores, values, _ = head("flat")
        result = paper_attend(scores, values, np.ones(1500, bool), uniforms(0), epsilon=0.1, delta=0.1)
        assert result["exact"]
        assert result["keys_read"] == 0

    @hypothesis.given(k=st.floats(1e-3, 1e5), L=st.floats(1e-2, 60))
    def test_tails_solve_their_equation(self, k, L):
        for mu in (paper._kl_upper(k, L), paper._kl_lower(k, L)):
            if mu > 1e-250:
                np.testing.assert_allclose(mu - k - k * np.log(mu / k), L, rtol=1e-6, atol=1e-9 * k)
        upper = -k * scipy.special.lambertw(-np.exp(-1 - L / k), -1).real
        if L / k < 500 and L / k > 1e-4:  # where lambertw neither underflows nor cancels
            np.testing.assert_allclose(paper._kl_upper(k, L), upper, rtol=1e-6)
        assert paper._kl_lower(k, L) < k < paper._kl_upper(k, L)
        assert paper._kl_upper(0.0, L) == L
        assert paper._kl_lower(0.0, L) == 0.0

    @parameterized.parameters(
        ({"epsilon": 0.0}, "epsilon must lie in"),
        ({"delta": 1.0}, "delta must lie in"),
        ({"measure": "l2"}, "measure must be one of"),
        ({"centre": "median"}, "centre must be"),
        ({"centre": np.zeros(3)}, "centre must have the shape"),
        ({"scores": np.full(1500, np.nan)}, "got NaN or inf"),
        ({"uniforms": np.zeros(1500)}, "must lie in"),
        ({"uniforms": np.ones(7)}, "one row for each"),
        ({"values": np.zeros(1500)}, "must be"),
    )
    def test_mistakes_are_named(self, change, message):
        scores, values, exact = head("flat")
        call = {"scores": scores, "values": values, "exact_mask": exact, "uniforms": uniforms(0)}
        call |= {"epsilon": 0.1, "delta": 0.1, "measure": "value"} | change
        arrays = [call.pop(name) for name in ("scores", "values", "exact_mask", "uniforms")]
        with pytest.raises(ValueError, match=message):
            paper_attend(*arrays, **call)


def test_events_fail_no_more_often_than_delta():
    # End to end with a large δ, so that a bound that ignores the sample's noise would show.
    fails = calls = 0
    for family in ("peaked", "flat", "pareto", "rank_one"):
        scores, values, exact = head(family)
        for seed in range(40):
            result = paper_attend(scores, values, exact, uniforms(seed), epsilon=0.6, delta=0.9)
            error, scale = true_error(result, scores, values, "value")
            calls += not result["exact"]
            fails += error > 0.6 * scale
    assert calls > 50
    assert fails == 0
