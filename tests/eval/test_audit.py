"""The audit finds what is wrong, and nothing where nothing is."""

import dataclasses

import chex
import numpy as np
import pytest

import certjax
from certjax.eval import audit
from tests.shared.recorded import recorded


@pytest.fixture(scope="module")
def inputs():
    return recorded()


@pytest.mark.parametrize("measure", audit.MEASURES)
def test_rows_of_a_sound_certificate(inputs, measure):
    rows = audit.audit(inputs, measure, epsilons=(0.2, 0.5), delta=0.1, steps=2, repeats=2)
    assert [row["epsilon"] for row in rows] == [0.2, 0.5]
    for row in rows:
        assert row["calls"] + row["exact"] + row["refused"] == 2 * 2 * 2 * 4  # layers, steps, repeats, heads
        assert (row["violations"], row["refused"], row["holds"]) == (0, 0, True)
        assert sum(row["histogram"]) == row["calls"]
        assert np.shape(row["keys_by_layer_and_head"]) == (2, 4)
    assert rows[1]["calls"] > 0
    assert 0 < rows[1]["largest"] <= 1
    assert rows[1]["tightness"] > 1
    assert rows[1]["keys_sampled"] < inputs.caches[0].capacity


def test_a_bound_that_is_too_small_is_a_violation(inputs, monkeypatch):
    """Errors stay below ε M, but not below what the certificate says of them; and a NaN is no small error."""
    decode = certjax.decode_attention
    for change in (
        lambda r: {"certificate": dataclasses.replace(r.certificate, error_bound=r.certificate.error_bound * 1e-3)},
        lambda r: {"output": r.output * np.float32("nan")},
    ):

        def broken(*args, change=change, **kwargs):
            result = decode(*args, **kwargs)
            return dataclasses.replace(result, **change(result))

        monkeypatch.setattr(certjax, "decode_attention", broken)
        audit._replay.clear_cache()
        (row,) = audit.audit(inputs, "value", epsilons=(0.5,), delta=1e-3, steps=1)
        audit._replay.clear_cache()
        assert row["violations"] == row["calls"] > 0
        assert not row["holds"]


def test_streams_and_measures_have_other_perturbations(inputs):
    largest = {
        audit.audit(inputs, "value", epsilons=(0.5,), delta=0.1, steps=1, stream=stream)[0]["largest"]
        for stream in (0, 0, 1)
    }
    assert len(largest) == 2


@pytest.mark.parametrize("measure", audit.MEASURES)
def test_a_broken_certificate_is_found(inputs, measure, monkeypatch):
    """An output, or a denominator, that is off by more than was claimed."""
    decode = certjax.decode_attention

    def broken(*args, **kwargs):
        result = decode(*args, **kwargs)
        proof = dataclasses.replace(result.certificate, log_normalizer=result.certificate.log_normalizer + 1)
        return dataclasses.replace(result, output=result.output + 3, certificate=proof)

    monkeypatch.setattr(certjax, "decode_attention", broken)
    audit._replay.clear_cache()
    (row,) = audit.audit(inputs, measure, epsilons=(0.5,), delta=1e-3, steps=2)
    audit._replay.clear_cache()
    assert row["violations"] == row["calls"] > 0
    assert not row["holds"]
    assert row["largest"] > 1


def test_the_worst_call_is_named(inputs, monkeypatch):
    """Layer 1, the position before the newest, head 2."""
    facts = {
        "certified": np.ones((2, 3, 1, 4), bool), "exact": np.zeros((2, 3, 1, 4), bool),
        "ratio": np.full((2, 3, 1, 4), 0.1), "tightness": np.full((2, 3, 1, 4), 5.0),
        "keys": np.ones((2, 3, 1, 4)), "bytes": np.ones((2, 3, 1, 4)),
        "broken": np.zeros((2, 3, 1, 4), bool), "off": np.zeros((2, 3, 1, 4), bool),
    }  # fmt: skip
    facts["ratio"][1, 1, 0, 2] = 0.7
    row = audit._row(facts, 1e-3)
    assert row["worst"] == {"layer": 1, "position": -2, "head": 2}
    assert row["largest"] == 0.7
    assert (row["violations"], row["wrong_exact"], row["holds"]) == (0, 0, True)
    wrong = {**facts, "exact": ~facts["exact"], "off": ~facts["off"]}
    assert not audit._row(wrong, 1e-3)["holds"]  # an exact head that is not


def test_interval_is_exact():
    low, high = audit.binomial_interval(0, 1000)
    chex.assert_trees_all_close((low, high), (0.0, 1 - 0.005 ** (1 / 1000)), rtol=1e-9)
    assert audit.binomial_interval(0, 0) == (0.0, 1.0)
    low, high = audit.binomial_interval(3, 3)
    chex.assert_trees_all_close((low, high), (0.005 ** (1 / 3), 1.0), rtol=1e-9)
