"""The error table's problems, budgets and rows."""

import numpy as np
import pytest

from certjax.eval import errors
from certjax.eval.methods.registry import METHODS
from tests.shared.recorded import GROUP, KV_HEADS, recorded, rotary


@pytest.fixture(scope="module")
def problems():
    return errors.problems_of(recorded(), [0, 1], rotary())


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
    ],
)
def test_budgets_use_what_they_are_given_and_no_more(problems, name, match):
    measured = errors.Measured(METHODS[name], problems)
    limit = {"keys": 200.0, "bytes": 20_000.0}[match]
    budget = measured.budget_for(match, limit)
    spent = errors.row(measured, budget)[match]
    assert 0.85 * limit <= spent <= limit


def test_what_cannot_be_had_for_so_little_is_refused(problems):
    assert errors.Measured(METHODS["quest"], problems).budget_for("bytes", 100.0) is None


def test_methods_that_run_in_numpy_go_one_by_one(problems):
    row = errors.row(errors.Measured(METHODS["paper"], problems), 0.5)
    assert row["max"] < 0.5
