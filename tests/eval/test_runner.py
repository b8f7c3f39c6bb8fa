"""A run: its rows, going on after a stop, and its report."""

import dataclasses
import html.parser
import json
import os
from pathlib import Path

import pytest

from certjax.eval import agreement, inputs, loading, report, runner, texts

PLAN = dataclasses.replace(
    runner.PRESETS["smoke"], lengths=(512,), ppl_lengths=(512,), methods=("dense", "certified", "quest"),
    audit_epsilons=(0.3,), audit_steps=1,
    ppl_epsilons=(0.2,), ppl_tokens=32, ppl_methods=("oracle_topk",), new_tokens=4, layers=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    said = []
    rows = runner.run(checkpoint, str(folder), PLAN, say=said.append)
    return folder, rows, said


@pytest.mark.slow
def test_rows_are_complete_and_name_what_they_depend_on(finished):
    folder, rows, said = finished
    ids = [row["id"] for row in rows]
    assert len(set(ids)) == len(ids)
    assert said == ids
    count = {part: sum(row["part"] == part for row in rows) for part in runner.PARTS}
    assert count == {"error": 2 + 2, "audit": 3, "ppl": 1 + 2 + 1, "agreement": 2}
    for row in rows:
        assert {"model", "seed", "jax", "CPU", "python"} <= set(row["stamp"])
        assert row["text_sha256"] == texts.read("reference").sha256
    assert all(row["holds"] for row in rows if row["part"] == "audit")
    quest = next(row for row in rows if row["id"] == "error/reference/512/quest/0.2/keys")
    ours = next(row for row in rows if row["id"] == "error/reference/512/certified/0.2/keys")
    assert quest["keys"] <= 1.1 * ours["keys"]
    assert json.loads((folder / "settings.json").read_text())["text reference"] == texts.read("reference").sha256


@pytest.mark.slow
def test_a_stopped_run_goes_on_where_it_stood(checkpoint, finished, tmp_path):
    """The last line torn, and a row of the middle missing: both come again, the others do not."""
    folder, rows, _ = finished
    lines = (folder / "rows.jsonl").read_text().splitlines()
    dropped = json.loads(lines[1])["id"]
    settings = (folder / "settings.json").read_text()
    (tmp_path / "settings.json").write_text(settings)
    (tmp_path / "rows.jsonl").write_text("\n".join([lines[0], *lines[2:]])[:-9])
    said = []
    again = runner.run(checkpoint, str(tmp_path), PLAN, say=said.append)
    assert said == [dropped, rows[-1]["id"]]
    strip = lambda rows: sorted((row["id"], row.get("errors")) for row in rows)
    assert strip(again) == strip(rows)


@pytest.mark.slow
def test_another_run_or_folder_is_refused(checkpoint, finished, tmp_path):
    with pytest.raises(ValueError, match="holds a run with another seed"):
        runner.run(checkpoint, str(finished[0]), dataclasses.replace(PLAN, seed=1))
    (tmp_path / "mine").write_text("")
    with pytest.raises(ValueError, match="is not empty and holds no run"):
        runner.run(checkpoint, str(tmp_path), PLAN)
    with pytest.raises(ValueError, match=r"holds no rows\.jsonl"):
        report.write(str(tmp_path))


def test_files_of_one_name_and_changed_files_are_refused(checkpoint, tmp_path):
    files = [tmp_path / name / "book.txt" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("word " * 2000)
    plan = dataclasses.replace(PLAN, texts=tuple(map(str, files)))
    with pytest.raises(ValueError, match=r"texts must have different names, .* got book, book; rename a file"):
        runner.run(checkpoint, str(tmp_path / "run"), plan)
    runner.Run(tmp_path / "run", {"seed": 1, "text book": "1"})
    runner.Run(tmp_path / "run", {"seed": 1, "text other": "2"})  # more texts may follow
    with pytest.raises(ValueError, match="holds a run with another text book"):
        runner.Run(tmp_path / "run", {"seed": 1, "text book": "3"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ("quest", "hash")}, "methods must be among dense, .*: got hash"),
        ({"lengths": (500,), "ppl_lengths": ()}, "lengths must be multiples of 64 of at least 512: got 500"),
        ({"epsilons": (2.0,)}, "epsilon must lie in"),
        ({"audit_steps": inputs.STEPS + 1}, "audit_steps must be at most"),
        ({"layers": 0}, "layers must be at least 1"),
        ({"ppl_tokens": 1}, "ppl_tokens must be at least 2"),
        ({"ppl_lengths": (1024,)}, "ppl_lengths must be among lengths"),
        ({"texts": ("code", "code")}, "texts must differ"),
    ],
)
def test_mistakes_in_a_plan(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PLAN, **change)


@pytest.mark.slow
def test_report_is_one_page_without_outside_resources(finished):
    folder, rows, _ = finished
    told = report.write(str(folder))
    assert f"{len(rows)} rows" in told
    page = (folder / "report.html").read_text()

    class Checker(html.parser.HTMLParser):
        tables = 0

        def handle_starttag(self, tag, attrs):
            assert tag != "script"
            assert not any(
                name in ("src", "href") and not value.startswith("#") for name, value in attrs if "xlink" not in name
            )
            self.tables += tag == "table"

    checker = Checker()
    checker.feed(page)
    sections = report.make_sections(rows)
    assert checker.tables == len(sections) == 2 + 1 + 1 + 1
    for section in sections:
        assert all(len(line) == len(section.columns) for line in section.lines)
        assert section.title in (folder / "report.md").read_text()
    assert set(json.loads((folder / "report.json").read_text())["tables"]) == {s.title for s in sections}


def _row(part, **facts):
    return {"id": facts.get("method", part), "part": part, "text": "t", "n": 512} | facts


def test_alarms():
    audit = {"violations": 5, "calls": 10, "delta": 1e-3, "interval": [0.1, 0.9]}
    assert report.alarms([_row("audit", holds=True, **audit)]) == []
    assert "5 violations in 10 calls" in report.alarms([_row("audit", holds=False, **audit)])[0]
    ppl = lambda method, kl, difference=0.0: _row(
        "ppl", method=method, perplexity=1.0, kl_mean=kl, nll_difference=difference, nll_difference_error=0.01
    )
    fine = [ppl("dense", 0.0), ppl("oracle_topk, 5% of the keys", 0.1), ppl("oracle_topk, 2% of the keys", 0.2)]
    assert report.alarms(fine) == []
    assert "diverges more than" in report.alarms([*fine[:2], ppl("oracle_topk, 2% of the keys", 0.05)])[0]
    assert report.alarms([ppl("quest", 0.1, -0.02)]) == []
    assert "better than dense attention by 5.0 standard errors" in report.alarms([ppl("quest", 0.1, -0.05)])[0]


def test_pooled_errors_and_missing_settings():
    row = {
        "method": "m",
        "title": "M",
        "family": "sampling",
        "budget": 9,
        "keys": 10.0,
        "bytes": 5.0,
        "errors": [0.1, 0.3],
    }
    line = report.pooled([row, row | {"keys": 20.0, "errors": [0.2, 0.4]}, {**row, "budget": None}])
    assert (line["keys"], line["max"], line["settings"], line["of"], line["heads"]) == (15, 0.4, 2, 3, 4)
    assert report.pooled([row | {"budget": None}])["p90"] is None


@pytest.mark.slow
def test_agreement_starts_from_the_texts_own_token(checkpoint):
    """Exact heads: the same text as dense attention's."""
    loaded, tokenizer = loading.load(checkpoint)
    ids = inputs.tokens(texts.read("reference"), tokenizer, 576)
    model = inputs.model_for(loaded, 576)
    recorded = inputs.record(model, ids[:512], past=4, steps=4, spare=64)
    row = agreement.compare(model, recorded, ids[512], epsilon=0.01, temperature=0.8, new_tokens=8, seed=3)
    assert row["exact_share"] == 1
    assert (row["same"], row["first_difference"]) == (1.0, None)


@pytest.mark.slow
def test_command_line(checkpoint, tmp_path):
    from certjax.eval import cli, cli_evaluation

    args = cli._parser().parse_args(
        f"audit {checkpoint} --out {tmp_path / 'run'} --preset smoke --n 512 --epsilon 0.3 --seed 4".split()
    )
    assert args.run(args) == 0
    rows = runner.read_rows(tmp_path / "run")
    assert [row["measure"] for row in rows] == ["value", "output", "denominator"]
    assert {row["seed"] for row in rows} == {4}
    assert Path(tmp_path / "run" / "report.html").is_file()
    assert cli_evaluation._broken([row | {"holds": False} for row in rows]) == 3


@pytest.mark.slow
@pytest.mark.skipif(
    "CERTJAX_DEMO_CHECKPOINT" not in os.environ,
    reason="CERTJAX_DEMO_CHECKPOINT is not set: `make test` makes the demo model",
)
def test_smoke_preset_on_the_demo_model(tmp_path):
    """All parts on a real model and text: the certificate holds, and rivals at as many keys are further off."""
    rows = runner.run(os.environ["CERTJAX_DEMO_CHECKPOINT"], str(tmp_path / "run"), runner.PRESETS["smoke"])
    assert "no alarms" in report.write(str(tmp_path / "run"))
    audits = [row for row in rows if row["part"] == "audit"]
    assert len(audits) == 12
    assert sum(row["calls"] for row in audits) > 3000
    assert not any(row["violations"] for row in audits)
    error = {row["method"]: row for row in rows if row["part"] == "error" and row["match"] == "keys"}
    for name in ("oracle_topk", "quest", "uniform"):
        assert error[name]["p90"] > 2 * error["certified"]["p90"]
