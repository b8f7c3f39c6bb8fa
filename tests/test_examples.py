"""The examples run, on contexts short enough for a test, and print what they promise."""

import importlib.util
import pathlib
import re

import pytest

EXAMPLES = sorted((pathlib.Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.fixture
def run(capsys):
    def run(name, **sizes):
        (path,) = (x for x in EXAMPLES if x.stem == name)
        spec = importlib.util.spec_from_file_location(f"example_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.main(**sizes)
        return capsys.readouterr().out

    return run


def test_flax_multi_head_attention(run):
    text = run("flax_multi_head_attention", context=4096, steps=5)
    (certified, of, sampled) = map(int, re.search(r"(\d+) of (\d+) certified, (\d+) of them sampled", text).groups())
    assert certified == of == 40
    assert sampled > 0
    assert float(re.search(r"differs .* by ([\d.]+) of", text)[1]) < 0.1


def test_own_module(run):
    rows = [line.split() for line in run("own_module", context=4096, steps=3).splitlines()[2:]]
    assert [row[:2] for row in rows] == [["0", "16"], ["1", "16"], ["2", "16"]]
    assert int(rows[0][2]) > 0
    for *_, bound, error in rows:
        assert float(error) <= float(bound) <= 0.11
