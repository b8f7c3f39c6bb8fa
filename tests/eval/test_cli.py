"""The console command: output, one-line errors, exit codes."""

import json
import subprocess
import sys

import pytest

from certjax.eval import doctor


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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "nothing.gguf", "out"), "no such file"),
        (("demo", "nowhere"), "not a certjax checkpoint"),
        (("demo", "nowhere", "--prompt", "nothing.txt"), "cannot be read"),
        (("demo", "nowhere", "--tokens", "1"), "tokens must be"),
    ],
)
def test_a_mistake_is_one_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run(*words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_text_that_is_not_utf8(tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe\x00")
    done = run("demo", "nowhere", "--prompt", str(bad))
    assert done.returncode == 1
    assert "is not UTF-8 text" in done.stderr
