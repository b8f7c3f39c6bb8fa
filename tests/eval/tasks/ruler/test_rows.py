"""Rows in a file: a run that was stopped goes on without losing or repeating one."""

import json

import pytest

from certjax.eval.tasks.ruler.rows import Rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "rows.jsonl"


def test_goes_on_after_a_line_that_was_cut_off(path):
    rows = Rows(path, {"seed": 1, "pair": (1, 2)})
    rows.add({"id": "a", "score": 1.0})
    rows.add({"id": "b", "score": 0.5, "text": "ε\n"})
    content = path.read_bytes()
    for cut in range(1, 30):
        path.write_bytes(content[:-cut])
        again = Rows(path, {"seed": 1, "pair": (1, 2)})
        assert "a" in again
        assert "b" not in again
        again.add({"id": "b", "score": 0.5, "text": "ε\n"})
        assert path.read_bytes() == content
    assert [row["id"] for row in Rows(path, {"seed": 1, "pair": (1, 2)}).rows] == ["a", "b"]
    assert json.loads(content.splitlines()[0])["run"] == {"seed": 1, "pair": [1, 2]}


def test_refuses_to_mix_or_repeat(path):
    rows = Rows(path, {"seed": 1})
    rows.add({"id": "a"})
    with pytest.raises(ValueError, match="has a row a already"):
        rows.add({"id": "a"})
    with pytest.raises(ValueError, match="another run: seed was 1, is 2"):
        Rows(path, {"seed": 2})
    line = path.read_text()
    path.write_text(line + line)
    with pytest.raises(ValueError, match="a occurs twice"):
        Rows(path, {"seed": 1})
    path.write_text("nonsense\n" + line)
    with pytest.raises(ValueError, match="line 1 is damaged"):
        Rows(path, {"seed": 1})
    with pytest.raises(ValueError, match="cannot be used"):
        Rows(path / "below", {})
