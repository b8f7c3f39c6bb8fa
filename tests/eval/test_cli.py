"""The console command: output, one-line errors, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from certjax.eval import demo, doctor
from certjax.eval.progress import Progress


def run(*words):
    return subprocess.run(
        [sys.executable, "-m", "certjax.eval.cli", *words], capture_output=True, text=True, timeout=120, check=False
    )


def test_doctor_tells_what_matters():
    rows = dict(doctor.report())
    for name in ("python", "jax", "extension", "threads", "transparent huge pages", "certified decode"):
        assert rows[name]
    if rows["extension"].startswith("loaded"):
        assert rows["ISA level chosen"] in rows["ISA levels usable here"]


def test_doctor_json_and_a_level_that_is_not_there(monkeypatch):
    monkeypatch.setenv("CERTJAX_ISA", "sse9")
    done = run("doctor", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    if rows["extension"].startswith("loaded"):
        assert "CERTJAX_ISA" in rows["ISA level chosen"]


MISTAKES = (
    (("convert", "nothing.gguf", "out"), "no such file"),
    (("demo", "nowhere"), "not a certjax checkpoint"),
    (("demo", "nowhere", "--prompt", "nothing.txt"), "cannot be read"),
    (("demo", "nowhere", "--tokens", "1"), "tokens must be"),
    (("demo", "nowhere", "--prompt", "blank.txt"), "blank.txt: holds no text"),
    (("ruler", "nowhere", "--out", "results"), "not a certjax checkpoint"),
    (("demo", "nowhere", "--seed", "9" * 23), "seed must lie in 0 … 4294967295: got 999"),
)

ONE_AFTER_ANOTHER = """
import sys
from certjax.eval import cli
for line in sys.stdin:
    try:
        cli.main(["certjax", *line.split()])
    except SystemExit as end:
        print("ends with", end.code, file=sys.stderr)
"""


def test_mistakes_are_one_line_each(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n")
    done = subprocess.run(
        [sys.executable, "-c", ONE_AFTER_ANOTHER],
        input="\n".join(" ".join(words) for words, _ in MISTAKES),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(MISTAKES), done.stderr
    assert lines[1::2] == ["ends with 1"] * len(MISTAKES)
    for line, (_, message) in zip(lines[::2], MISTAKES, strict=True):
        assert line.startswith("certjax: ")
        assert message in line


def test_text_that_is_not_utf8(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\x00")
    done = run("demo", "nowhere", "--prompt", str(bad))
    assert done.returncode == 1
    assert "is not UTF-8 text" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_output_that_the_terminal_cannot_show(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    done = run("convert", str(Path(__file__).parents[1] / "golden" / "tiny" / "llama2"), str(tmp_path / "ε"))
    assert done.returncode == 0, done.stderr
    assert "?: llama" in done.stdout


def test_progress_speaks_only_once_there_is_some(capsys):
    with Progress("reading"):
        pass
    assert capsys.readouterr().err == ""
    with Progress("reading", "files") as progress:
        progress(1, 2)
        progress(2, 2)
    first, last = capsys.readouterr().err.splitlines()
    assert first == "reading …"
    assert last.startswith("reading: 2/2 files")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epsilon": 1.0}, "epsilon must lie in"),
        ({"epsilon": float("nan")}, "epsilon must lie in"),
        ({"delta_total": 0.0}, "delta must lie in"),
        ({"seed": -1}, "seed must lie in"),
        ({"seed": 2**32}, "seed must lie in"),
    ],
)
def test_numbers_are_checked_before_the_model_is_loaded(options, message):
    with pytest.raises(ValueError, match=message):
        demo.run("nowhere", **options)
