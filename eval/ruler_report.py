"""What `certjax ruler` makes of its rows: a cell for each task, length, setup and attention, and means."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from certjax.eval.tasks import ruler
from certjax.eval.tasks.ruler.rows import Row

_NOTES = """\
score: official, in points, with a 95 % interval (Wilson). − dense: difference on the same samples with an interval of
at least 95 %, whatever the scores are and however few (Hoeffding; see `ruler.paired`); p: sign test, exact (McNemar's
for scores of 0 and 1). "gated": the dense score is below {gate:g}, so that the cell tells nothing of an attention; the
gate looks at the scores that are compared, so dense scores just above it are a little too good. "above dense":
significantly better than dense attention in spite of the number of comparisons (p times that number below 0.05), which
no approximation should be: look for a fault. exact: share of query heads that were read whole; keys: pool keys read, or
asked for, a query head; the first and the newest {window} tokens are exact for all and come on top. A: the prompt is
dense; B: the question is not. "all": every sample of tasks that are not gated.
"""


def summary(rows: Sequence[Row], gate: float) -> dict[str, Any]:
    """Cells and means.

    Args:
      rows: of `Rows`.
      gate: in points.

    Returns:
      `cells`, a list; `pooled`, differences over all tasks that pass the gate; `means` over tasks by setup and
      attention, with weighted averages and effective length where all thirteen tasks were run.
    """
    found: dict[tuple, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        found[row["task"], row["length"], row["setup"], row["attention"]][row["id"].rsplit("/", 2)[0]] = row
    cells: list[dict[str, Any]] = []
    pools: dict[tuple, list[tuple[float, float]]] = defaultdict(list)
    for (task, length, setup, attention), here in found.items():
        dense = found.get((task, length, setup, "dense"), {})
        both = [name for name in here if name in dense]
        scores = [row["score"] for row in here.values()]
        dense_score = ruler.task_score([row["score"] for row in dense.values()]) if dense else None
        cell = {
            "task": task, "length": length, "setup": setup, "attention": attention, "samples": len(here),
            "score": ruler.task_score(scores), "interval": list(ruler.interval(scores)),
            "nulls": sum(row["null"] for row in here.values()),
            "gated": dense_score is not None and dense_score < gate,
            "exact": _mean(here, "exact"), "keys_read": _mean(here, "keys_read"),
            "certified": _mean(here, "certified"), "seconds": _mean(here, "seconds"),
        }  # fmt: skip
        if attention != "dense" and both:
            pairs = [(dense[name]["score"], here[name]["score"]) for name in both]
            cell |= _difference(pairs)
            if not cell["gated"]:
                pools[length, setup, attention] += pairs
        cells.append(cell)
    pooled = [
        {"task": "all", "length": length, "setup": setup, "attention": attention, **_difference(pairs)}
        for (length, setup, attention), pairs in pools.items()
    ]
    compared = [row for row in [*cells, *pooled] if "p_value" in row]
    for row in compared:
        row["above_dense"] = row["difference"] > 0 and row["p_value"] * len(compared) < 0.05
    return {"cells": cells, "pooled": pooled, "means": _means(cells)}


def _mean(rows: dict[str, Row], name: str) -> float | None:
    values = [row[name] for row in rows.values() if name in row]
    return sum(values) / len(values) if values else None


def _difference(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    result = ruler.paired(*zip(*pairs, strict=True))
    return {
        "paired_samples": result.samples,
        "difference": result.difference,
        "difference_interval": [result.low, result.high],
        "p_value": result.p_value,
    }


def _means(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    scores: dict[tuple, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for cell in cells:
        scores[cell["setup"], cell["attention"]][cell["length"]].append(cell["score"])
    rows = []
    for (setup, attention), by_length in scores.items():
        means = {length: sum(x) / len(x) for length, x in sorted(by_length.items())}
        row: dict[str, Any] = {"setup": setup, "attention": attention, "mean": means}
        row["tasks"] = {length: len(by_length[length]) for length in means}
        if set(row["tasks"].values()) == {len(ruler.TASKS)}:
            row["effective"] = ruler.effective_length(means)
            if len(means) > 1:
                row["wavg_inc"], row["wavg_dec"] = ruler.weighted_averages(means)
        rows.append(row)
    return rows


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    settings = result["settings"]
    sources = "; ".join(f"{name}: {settings[name]['name']}" for name in ("words", "essay", "qa_1", "qa_2"))
    notes = _NOTES.format(gate=result["gate"], window=settings["window"])
    print(
        f"RULER, generator {settings['generator']}, policy {settings['policy']}, seed {settings['seed']}, answer "
        f"prefix {'on' if settings['prefix'] else 'off'}, chat format {settings['chat'] or 'off'}; "
        f"templates: {settings['templates_name']}; {sources}\n\n{notes}"
    )
    print("| task | length | setup | attention | samples | score | nulls | − dense | p | exact | keys | |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for cell in [*result["cells"], *result["pooled"]]:
        print("| " + " | ".join(_line(cell)) + " |")
    for row in result["means"]:
        lengths = ", ".join(f"{n}: {x:.1f} ({row['tasks'][n]} tasks)" for n, x in row["mean"].items())
        more = f"; wAvg inc {row['wavg_inc']:.1f}, dec {row['wavg_dec']:.1f}" if "wavg_inc" in row else ""
        print(f"mean, setup {row['setup']}, {row['attention']}: {lengths}{more}")


def _line(cell: dict[str, Any]) -> list[str]:
    number = lambda name, form: "–" if cell.get(name) is None else format(cell[name], form)
    span = lambda name: "–" if name not in cell else "{:.1f} … {:.1f}".format(*cell[name])
    marks = [mark for mark, on in (("gated", cell.get("gated")), ("above dense", cell.get("above_dense"))) if on]
    return [
        cell["task"], str(cell["length"]), cell["setup"], cell["attention"],
        str(cell.get("samples", cell.get("paired_samples"))),
        f"{number('score', '.2f')} ({span('interval')})", number("nulls", "d"),
        f"{number('difference', '+.2f')} ({span('difference_interval')})" if "difference" in cell else "–",
        number("p_value", ".3f"), number("exact", ".0%"), number("keys_read", ".0f"), ", ".join(marks),
    ]  # fmt: skip
