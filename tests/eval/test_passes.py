"""Retrieval in a model: the three passes, going on after a stop, the table and the alarm."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import certjax
from certjax import retrieval
from certjax.eval import (
    cli,
    inputs,
    loading,
    passes,
    passes_curve,
    passes_plan,
    passes_report,
    retrieval_attention,
    stepwise,
    texts,
)
from certjax.retrieval import oracles

# The pool is smaller than k: everything may be read.
PLAN = passes_plan.Plan(
    lengths=(1024,), tasks=("niah_single_1",), examples=1, pairs=(("softmax_lift", "faiss_flat"),), k=400, window=384,
    epsilons=(0.3,), new_tokens=4, curve_lengths=(), layers=1,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Tiny models take far longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def finished(long_checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("passes") / "run"
    said = []
    rows = passes.run(long_checkpoint, str(folder), PLAN, say=said.append)
    return folder, {row["id"]: row for row in rows}, said


def test_a_strategy_that_may_read_everything_is_dense_attention(finished):
    _, rows, said = finished
    assert list(rows) == said
    sample = "niah_single_1-1024-fresh0-00000"
    found = {part: rows[f"{sample}/softmax_lift/faiss_flat/{part}"] for part in ("accuracy", "latency", "clean")}
    for name in ("attention_error", "context_error", "logit_error"):
        assert found["accuracy"][name] < 1e-4
    assert found["accuracy"]["recall"] == 1
    assert found["clean"]["prediction"] == rows[f"{sample}/dense/clean"]["prediction"]
    assert min(found["latency"][f"{name}_seconds"] for name in ("search", "movement", "attention")) > 0
    assert found["clean"]["response_seconds"] > found["clean"]["first_token_seconds"] + found["latency"]["build"]
    certified = rows[f"{sample}/certified 0.3/accuracy"]
    assert certified["logit_error"] > 1e-4
    assert certified["keys"] < found["accuracy"]["keys"]
    free = rows[f"{sample}/certified keys/accuracy"]  # it may read everything too
    assert free["attention_error"] < 0.2 * certified["attention_error"]


def test_a_stopped_run_goes_on_where_it_stood(long_checkpoint, finished, tmp_path):
    folder, rows, _ = finished
    lines = (folder / "rows.jsonl").read_text().splitlines()
    (tmp_path / "settings.json").write_text((folder / "settings.json").read_text())
    (tmp_path / "rows.jsonl").write_text("\n".join(lines)[:-9])
    said = []
    again = passes.run(long_checkpoint, str(tmp_path), PLAN, say=said.append)
    assert said == [json.loads(lines[-1])["id"]]
    assert [row["id"] for row in again] == list(rows)
    with pytest.raises(ValueError, match="holds a run with another plan"):
        passes.run(long_checkpoint, str(tmp_path), dataclasses.replace(PLAN, k=64))


def test_table(finished):
    folder, rows, _ = finished
    assert f"{len(rows)} rows" in passes_report.write(str(folder))
    page = (folder / "retrieval.md").read_text()
    sections = passes_report.make_sections(list(rows.values()))
    assert [len(section.lines) for section in sections] == [1 + 3 + 1]
    for section in sections:
        assert all(len(line) == len(section.columns) for line in section.lines)
        assert section.title in page
    assert "First-token latency" in page


def test_table_of_errors_against_k():
    base = {"part": "curve", "text": "t", "n": 512, "k": 16}
    rows = [base | {"method": "top_k", "at": k, "attention_error": 1 / k} for k in (4, 16)]
    certified = base | {"method": "certified", "epsilon": 0.2, "keys": 15.0, "attention_error": 0.05}
    rows += [certified | {"at": 16}, base | {"method": "certified", "at": 4, "attention_error": None}]
    rows.append(certified | {"at": None, "bytes": 1000.0, "exact": 0.5})
    (section,) = passes_report.make_sections(rows)
    assert section.columns == ("attention", "k = 4", "k = 16")
    assert section.lines == [
        ("TopK", "0.2500", "0.0625"),
        ("certified, equal keys", "–", "0.0500 (ε = 0.2, 15 keys)"),
    ]
    assert "ε = 0.2: error 0.0500, 15 keys, 1000 bytes a query head, 50.0% of the heads exact" in section.note


def test_alarm_where_softmax_lift_does_not_win():
    row = lambda method, error: {
        "part": "curve", "text": "t", "n": 512, "k": 8, "at": 8, "method": method, "attention_error": error,
    }  # fmt: skip
    fine = [row("softmax_lift", 0.1), row("top_k", 0.2), row("top_k_sampling", 0.3)]
    assert passes_report.alarms(fine) == []
    assert passes_report.alarms([fine[0], row("top_k", 0.1)]) == [
        "t, n = 512, Flat: SoftmaxLift's attention error of 0.1000 is not below TopK's 0.1000"
    ]


@dataclasses.dataclass(frozen=True)
class Forgetful:
    """Exact, but for every second point, which it does not know."""

    def build(self, points, queries=None):
        del queries
        return ForgetfulSearcher(points)


class ForgetfulSearcher:
    def __init__(self, points):
        self.points = points

    def search(self, queries, k):
        known = np.arange(0, len(self.points), 2)
        return oracles.best(queries @ self.points[known].T, known, k)


@pytest.fixture(scope="module")
def read(long_checkpoint):
    """A model, what it holds of 512 tokens, and the next ones."""
    loaded, tokenizer = loading.load(long_checkpoint)
    ids = inputs.tokens(texts.read("reference"), tokenizer, 520)
    model = inputs.model_for(loaded, 576)
    return model, inputs.record(model, ids[:512], past=20, spare=64), ids[512:]


def test_recall_counts_what_an_oracle_misses(read):
    model, recorded, following = read
    strategy = retrieval.SoftmaxLift(budget=64, window=64)
    hints, _ = retrieval_attention.build(strategy, Forgetful(), recorded)
    attention = retrieval_attention.RetrievalAttention(strategy)
    stepper = stepwise.Stepper(model, attention, config=certjax.Config(), measure=True)
    _, facts, _ = stepper.feed(following, recorded.caches, hints)
    retrieval_attention.release(hints)
    assert 0.3 < facts["hits"].sum() / facts["wanted"].sum() < 0.7


def test_errors_against_k(read):
    queries = passes_curve.queries_of(read[1], 1)
    few, all_of_them = (
        passes_curve.strategy_error(queries, retrieval.TopK(budget=k, window=256))["attention_error"] for k in (8, 255)
    )
    assert all_of_them < 1e-5 < few
    certified = passes_curve.Certified(queries, window=256, sinks=1, delta=1e-3)
    loose = certified.row(0.9)
    assert loose["keys"] < 192
    half = certified.within("keys", 128)
    assert half["keys"] <= 128
    assert certified.within("keys", 255)["attention_error"] <= half["attention_error"]
    assert certified.within("bytes", 1) is None


def test_layer_by_layer_steps_are_the_models_own(long_checkpoint):
    loaded, tokenizer = loading.load(long_checkpoint)
    ids = tokenizer.encode("layer by layer")
    model = inputs.model_for(loaded, 64)
    stepper = stepwise.Stepper(model, stepwise.dense, config=certjax.Config(), measure=True)
    logits, facts, caches = stepper.feed(ids, model.init_caches(1, 64), model.init_hints(1))
    np.testing.assert_allclose(logits, model(np.asarray([ids]))[0], atol=1e-4)
    assert facts["error"].max() == 0
    assert caches[0].length[0] == len(ids)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": (("best", "flat"),)}, "strategies must be among softmax_lift, .*: got best"),
        ({"pairs": (("top_k", "tree"),)}, "oracles must be among flat, .*: got tree"),
        ({"curve_lengths": (500,)}, "lengths must be multiples of 64 above 128: got 500"),
        ({"k": 3}, "k must be at least 4: got 3"),
        ({"epsilons": (2.0,)}, "epsilon must lie in"),
    ],
)
def test_mistakes_in_a_plan(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)


def test_command_takes_names(long_checkpoint, tmp_path, capsys):
    with pytest.raises(SystemExit, match="1"):
        cli.main(["certjax", "retrieval", long_checkpoint, "--out", str(tmp_path), "--strategies", "best"])
    assert "strategies must be among" in capsys.readouterr().err
