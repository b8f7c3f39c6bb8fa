"""A stand-in for a tokenizer that counts its calls, and what prompts are made from."""

import re

import pytest

from certjax.eval.tasks import ruler


class Pieces:
    """Pieces of up to four letters, marks and line ends; `calls` counts texts."""

    calls = 0

    def encode(self, text, add_bos=True):
        self.calls += 1
        return re.findall(r"\w{1,4}|[^\w ]", text)


@pytest.fixture(scope="session")
def tokenizer():
    return Pieces()


@pytest.fixture(scope="session")
def materials():
    return ruler.load_materials()
