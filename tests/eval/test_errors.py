"""The error table's problems, budgets and rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certjax.eval import errors
from certjax.eval.methods.registry import METHODS
from tests.shared.recorded import GROUP, KV_HEADS, recorded, rotary


@pytest.fixture(scope="module")
def problems():
    return errors.problems_of(recorded(), [0, 1], rotary())


def test_window_and_sinks_are_exact_for_everyone(problems):
    """A value that only the window, or a sink, holds is found whatever the scores say."""
    for at in (0, errors.SINKS - 1, 512 - errors.WINDOW, 511):
        first = jax.tree.map(lambda x: x[0], problems.problem)
        marked = dataclasses.replace(first, values=jnp.zeros_like(first.values).at[at].set(1e4))
        query = problems.query[0]
        exact, _ = errors._dense(marked, query)
        for name in ("streaming_llm", "quest", "uniform", "sparq", "tactic", "knorm"):
            method = METHODS[name]
            rng = jax.random.key(0)
            found = method.attend(marked, method.prepare(marked, rng), query, 0.3 if method.knob else 100, rng)
            assert (np.asarray(found.output)[:, 0] > np.asarray(exact)[:, 0] / 2).all(), (name, at)


def test_problems_are_the_kv_heads_of_the_layers(problems):
    assert problems.layers.tolist() == [0, 0, 1, 1]
    assert problems.query.shape[:2] == (2 * KV_HEADS, GROUP)
    for p in range(4):
        key, value, query = (
            np.asarray(x[p], np.float64) for x in (problems.problem.keys, problems.problem.values, problems.query)
        )
        score = query @ key.T * problems.problem.scale
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        np.testing.assert_allclose(problems.output[p], weight @ value, atol=1e-5)
        np.testing.assert_allclose(problems.scale[p] ** 2, weight @ (value**2).sum(-1), rtol=1e-5)


def test_dense_attention_has_no_error_and_certified_less_than_claimed(problems):
    dense = errors.row(errors.Measured(METHODS["dense"], problems), 512)
    assert dense["max"] < 1e-5
    assert dense["keys"] == 512
    ours = errors.row(errors.Measured(METHODS["certified"], problems), 0.5)
    assert ours["seeds"] == errors.SEEDS
    assert 1e-4 < ours["max"] < 0.5
    assert ours["keys"] < 512
    assert len(ours["errors"]) == ours["seeds"] * ours["heads"]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("oracle_topk", "keys"),
        ("oracle_topk", "bytes"),
        ("quest", "bytes"),
        ("oracle_topp", "keys"),
        ("uniform", "keys"),
        ("vattention_fixed", "keys"),
        ("tactic", "keys"),
    ],
)
def test_budgets_use_what_they_are_given_and_no_more(problems, name, match):
    measured = errors.Measured(METHODS[name], problems)
    limit = {"keys": 200.0, "bytes": 20_000.0}[match]
    budget = measured.budget_for(match, limit)
    spent = errors.row(measured, budget)[match]
    assert (0.85 if name == "quest" else 0.95) * limit <= spent <= limit


def test_what_cannot_be_had_for_so_little_is_refused(problems):
    assert errors.Measured(METHODS["quest"], problems).budget_for("bytes", 100.0) is None


def test_methods_that_run_in_numpy_go_one_by_one(problems):
    row = errors.row(errors.Measured(METHODS["paper"], problems), 0.5)
    assert 1e-4 < row["max"] < 0.5
    assert row["keys"] < 512


def test_draws_are_different_ones(problems):
    """Also where the method draws in its index."""
    for name in ("uniform", "magicpig", "certified"):
        measured = errors.Measured(METHODS[name], problems)
        budget = {"uniform": 200, "magicpig": 50.0, "certified": 0.5}[name]
        one, two = (np.asarray(measured.outcome(budget, draw).output) for draw in (0, 1))
        assert np.abs(one - two).max() > 1e-4


@pytest.mark.parametrize(("name", "most"), [("twilight", 0.9999), ("magicpig", 300), ("oracle_topk", 512)])
def test_all_is_taken_where_the_limit_allows(problems, name, most):
    assert errors.Measured(METHODS[name], problems).budget_for("bytes", 1e9) == most
