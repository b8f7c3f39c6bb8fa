"""The command as a whole on a tiny model: rows, going on, and what is made of rows."""

import json

import pytest

from certjax.eval import ruler, ruler_report

OPTIONS = {"tasks": ["niah_single_1", "qa_1"], "lengths": [1024], "samples": 2, "setups": ["A", "B"]}


def stable(rows):
    return [{name: x for name, x in row.items() if not name.endswith("seconds")} for row in rows]


def test_rows_are_complete_and_a_run_goes_on(long_checkpoint, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    summary = ruler.run(long_checkpoint, out=str(tmp_path), **OPTIONS)
    content = file.read_text()
    rows = [json.loads(line) for line in content.splitlines()]
    assert len({row["id"] for row in rows}) == len(rows) == 2 * 2 * 2 * 2
    for row in rows:
        assert row["prompt_tokens"] + row["budget"] <= 1024
        assert row["run"]["policy"] == "fresh"
        assert row["run"]["environment"]["jax"]
        assert (row["run"]["prefix"], row["run"]["chat"]) == (True, None)
    assert summary == json.loads((tmp_path / "summary.json").read_text(), object_hook=whole_numbers)
    assert [cell["samples"] for cell in summary["cells"]] == [2] * 8
    assert all(cell["gated"] for cell in summary["cells"])  # a model with random weights finds nothing
    assert "policy fresh" in capsys.readouterr().out

    lines = content.splitlines(keepends=True)
    file.write_text("".join(lines[:9]) + lines[9][:40])
    ruler.run(long_checkpoint, out=str(tmp_path), **OPTIONS)
    again = [json.loads(line) for line in file.read_text().splitlines()]
    assert stable(again) == stable(rows)
    with pytest.raises(ValueError, match="another run: seed was 42, is 43"):
        ruler.run(long_checkpoint, out=str(tmp_path), seed=43, **OPTIONS)


def whole_numbers(found):
    """JSON has strings for the lengths that are keys."""
    return {int(key) if key.isdigit() else key: x for key, x in found.items()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [2048]}, "length 2048 exceeds the model's longest context of 1024"),
        ({"lengths": [0]}, "lengths must be positive"),
        ({"samples": 0}, "samples must be positive"),
        ({"tasks": ["poem"]}, "unknown task 'poem'"),
        ({"attentions": ["sparse"]}, "attention must be one of"),
        ({"epsilon": 2.0}, "epsilon must lie in"),
        ({"chat": "mine"}, "unknown chat format 'mine'"),
    ],
)
def test_mistakes(options, message, long_checkpoint, tmp_path):
    with pytest.raises(ValueError, match=message):
        ruler.run(long_checkpoint, out=str(tmp_path), **(OPTIONS | options))


def row(task, index, attention, score, setup="B"):
    name = f"{task}-4096-fresh42-{index:05d}/{setup}/{attention}"
    return {
        "id": name, "task": task, "length": 4096, "setup": setup, "attention": attention, "score": score, "null": False,
        "seconds": 1.0,
    }  # fmt: skip


def test_a_name_stands_for_one_attention(long_checkpoint, tmp_path):
    options = OPTIONS | {"tasks": ["qa_1"], "samples": 1, "setups": ["A"]}
    ruler.run(long_checkpoint, out=str(tmp_path), attentions={"x": "dense"}, **options)
    with pytest.raises(ValueError, match="x was dense, is certified: give it another name"):
        ruler.run(long_checkpoint, out=str(tmp_path), attentions={"x": "certified"}, **options)


def test_few_samples_are_no_alarm():
    rows = [row("vt", i, name, score) for i in range(4) for name, score in (("dense", 0.6), ("certified", 0.8))]
    assert not any(cell.get("above_dense") for cell in ruler_report.summary(rows, gate=50)["cells"])


def test_cells_are_gated_and_compared_by_sample():
    rows = [row("vt", i, "dense", 0.2) for i in range(9)] + [row("vt", i, "certified", 0.4) for i in range(9)]
    rows += [row("qa_1", i, "dense", 1.0) for i in range(10)]
    rows += [row("qa_1", i, "certified", float(i > 1)) for i in reversed(range(8))]  # other order, two not run yet
    result = ruler_report.summary(rows, gate=50)
    cells = {(cell["task"], cell["attention"]): cell for cell in result["cells"]}
    assert cells["vt", "certified"]["gated"]
    assert cells["vt", "certified"]["above_dense"]
    cell = cells["qa_1", "certified"]
    assert not cell["gated"]
    assert (cell["samples"], cell["paired_samples"], cell["score"]) == (8, 8, 75.0)
    assert cell["difference"] == -25
    assert cell["p_value"] == 0.5
    assert cell["difference_interval"][0] < -25 < 0 < cell["difference_interval"][1]
    (pooled,) = result["pooled"]
    assert (pooled["paired_samples"], pooled["difference"]) == (8, -25)  # vt is not in it
    (mean,) = (mean for mean in result["means"] if mean["attention"] == "dense")
    assert mean["mean"] == {4096: 60.0}
    assert "wavg_inc" not in mean  # two tasks are not thirteen
