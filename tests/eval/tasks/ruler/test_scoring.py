"""Scores by hand, and the published averages of one model."""

import pytest

from certjax.eval.tasks import ruler


@pytest.mark.parametrize(
    ("metric", "prediction", "references", "expected"),
    [
        ("all", "7000001, 7000002", ["7000001", "7000002"], 1.0),
        ("all", "It is 7000001.", ["7000001", "7000002", "7000003", "7000004"], 0.25),
        ("all", "ABCDE fghij", ["abcde", "FGHIJ", "KLMNO"], 2 / 3),
        ("all", "", ["7000001"], 0.0),
        ("all", "12345678", ["2345678"], 1.0),  # a substring counts
        ("part", "in the year 1066", ["1066", "the year 1066", "10 66"], 1.0),
        ("part", "denver broncos", ["Denver", "Boston"], 1.0),
        ("part", "nothing", ["Denver", "Boston"], 0.0),
        ("all", "one\x00two", ["one\ntwo"], 1.0),  # control characters become line ends, and are not deleted
        ("all", "one\ttwo", ["onetwo"], 0.0),
    ],
)
def test_scores(metric, prediction, references, expected):
    assert ruler.score(metric, prediction, references) == pytest.approx(expected)


def test_clean():
    assert ruler.clean(" \x00\x1f a\rb\x02 \n") == "a\nb"
    assert ruler.clean("\x07\t ") == ""


def test_task_score_is_rounded():
    assert ruler.task_score([1, 0, 0]) == 33.33
    assert ruler.task_score([1, 1, 0]) == 66.67


# Llama-3.1-8B's published row.
def test_averages_over_lengths():
    row = dict(zip((4096, 8192, 16384, 32768, 65536, 131072), (95.5, 93.8, 91.6, 87.4, 84.7, 77.0), strict=True))
    increasing, decreasing = ruler.weighted_averages(dict(reversed(row.items())))
    assert round(increasing, 1) == 85.4
    assert round(decreasing, 1) == 91.3
    assert ruler.effective_length(row) == 32768
    assert ruler.effective_length({4096: 85.5}) is None


def test_mistakes():
    with pytest.raises(ValueError, match="references is empty"):
        ruler.score("all", "a", [])
    with pytest.raises(ValueError, match='metric must be "all" or "part"'):
        ruler.score("some", "a", ["a"])
