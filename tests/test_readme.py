"""What the README shows runs as written."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_first_example_runs(capsys):
    (code,) = re.findall(r"<!-- tests/test_readme.py runs this block -->\n```python\n(.*?)```", README, re.DOTALL)
    scope = {}
    exec(compile(code, "README.md", "exec"), scope)
    certificate = scope["result"].certificate
    assert scope["result"].output.shape == (1, 1, 8, 64)
    assert bool(certificate.certified.all())
    assert not bool(certificate.exact.all())
    assert "(1, 1, 8, 64) True" in capsys.readouterr().out


def test_no_placeholder_is_left():
    assert not re.findall(r"^[A-Z_]{4,}$", README, re.MULTILINE)
