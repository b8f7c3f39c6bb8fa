"""Tables and alarms of a `certjax retrieval` run, as Markdown."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from certjax.eval import passes, passes_curve, report
from certjax.eval.passes_plan import STRATEGIES
from certjax.eval.report_page import Section
from certjax.eval.run_folder import read_rows

Row = dict[str, Any]
_NAMES = {name: title for name, (title, _) in STRATEGIES.items()}
_COLUMNS = (
    ("attention error", "attention_error", ".4f", 1), ("context error", "context_error", ".4f", 1),
    ("logit error", "logit_error", ".4f", 1), ("recall", "recall", ".3f", 1), ("failed", "failed", ".3f", 1),
    ("keys", "keys", ".0f", 1), ("KiB", "bytes", ".1f", 1 / 1024),
    ("build, s", "build", ".1f", 1), ("search, ms", "search_seconds", ".1f", 1e3),
    ("movement, ms", "movement_seconds", ".1f", 1e3), ("attention, ms", "attention_seconds", ".1f", 1e3),
    ("score", "score", ".0f", 100), ("first token, s", "first_token_seconds", ".2f", 1),
    ("later tokens, ms", "later_token_seconds", ".0f", 1e3), ("response, s", "response_seconds", ".1f", 1),
)  # fmt: skip


def write(folder: str) -> str:
    """Writes retrieval.md into the folder of a run.

    Returns:
      What to print: the alarms, and where the tables are.

    Raises:
      ValueError: no run in the folder.
    """
    rows = read_rows(folder)
    if not rows:
        raise ValueError(f"{folder}: the run has no rows yet; give it time, or start it again")
    warnings = alarms(rows)
    page = report.markdown(make_sections(rows), warnings, _facts(rows))
    out = Path(folder) / "retrieval.md"
    out.write_text(page.replace("# certjax evaluation", "# Attention through vector search", 1), encoding="utf-8")
    told = [f"ALARM: {warning}" for warning in warnings] or ["no alarms"]
    return "\n".join([*told, f"{out}: {len(rows)} rows"])


def _facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    facts = {name: str(value) for name, value in rows[0]["stamp"].items()}
    facts["exact"] = f"the first {rows[0]['sinks']} and the newest {rows[0]['window']} tokens of the context"
    for row in rows:
        if row["part"] == "curve":
            facts[f"text {row['text']}"] = f"{row['source']}, sha256 {row['text_sha256']}"
    return list(facts.items())


def make_sections(rows: Sequence[Row]) -> list[Section]:
    """The tables that a run has rows for."""
    made = []
    examples = [row for row in rows if row["part"] != "curve"]
    for n in sorted({row["n"] for row in examples}):
        arms = _arms(row for row in examples if row["n"] == n)
        k = examples[0]["k"]
        lift = {arm for arm in arms if arm.startswith("softmax_lift/")}
        first = next((arm for arm in arms if arm in lift), None)
        main = {name: arm for name, arm in arms.items() if name not in lift or name == first}
        made.append(Section(f"Strategies at k = {k}, n = {n}", passes.__doc__ or "", *_table(main)))
        if len(lift) > 1:
            chosen = {name: arms[name] for name in arms if name in lift}
            made.append(Section(f"SoftmaxLift by oracle at k = {k}, n = {n}", "As above.", *_table(chosen)))
    curve = [row for row in rows if row["part"] == "curve"]
    for text, n in sorted({(row["text"], row["n"]) for row in curve}):
        made.append(_curve_section([row for row in curve if (row["text"], row["n"]) == (text, n)], text, n))
    return made


def _arms(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """What is known of each kind of attention, over its examples."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["arm"]].append(row)
    arms = {}
    # A run that was stopped may have its rows in another order.
    place = lambda arm: (arm != "dense", not arm.startswith("certified"))
    for arm, group in sorted(groups.items(), key=lambda item: place(item[0])):
        samples = {row["sample"] for row in group}
        names = {name for row in group for name in row}
        values = {name: [row[name] for row in group if row.get(name) is not None] for name in names}
        arms[arm] = {name: x for name, x in values.items() if x} | {"samples": samples}
    return arms


def _table(arms: dict[str, dict[str, Any]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and lines; means over the examples, errors with their range."""
    lines = []
    for arm, facts in arms.items():
        cells = []
        for _, name, form, factor in _COLUMNS:
            cells.append(report._number(factor * float(np.mean(facts[name])) if name in facts else None, form))
            if name.endswith("error") and len(facts.get(name, ())) > 1:
                cells[-1] += f" ({min(facts[name]):.4f} … {max(facts[name]):.4f})"
        lines.append((_title(arm, facts), *cells, str(len(facts["samples"]))))
    return ("attention", *(title for title, *_ in _COLUMNS), "examples"), lines


def _title(arm: str, facts: dict[str, Any]) -> str:
    if "strategy" in facts:
        strategy, oracle = arm.split("/")
        return f"{_NAMES[strategy]}, {oracle}"
    if "epsilon" in facts:
        epsilon = "/".join(f"{x:.3g}" for x in sorted(set(facts["epsilon"])))
        what = {"keys": " (equal keys)", "bytes": " (equal bytes)"}.get(arm.split()[-1], "")
        return f"certified, ε = {epsilon}{what}"
    return arm + (": no ε reads so little" if "attainable" in facts else "")


def _curve_section(rows: Sequence[Row], text: str, n: int) -> Section:
    ks = sorted({row["at"] for row in rows if row["at"] is not None})
    found = {(row["method"], row["at"]): row for row in rows}
    titles = _NAMES | {
        "certified": "certified, equal keys",
        "certified bytes": "certified, equal bytes (SoftmaxLift's)",
    }
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows if row["at"] is not None):
        cells = []
        for k in ks:
            row = found.get((method, k), {"attention_error": None})
            cell = report._number(row["attention_error"], ".4f")
            cells.append(cell + (f" (ε = {row['epsilon']:.2g}, {row['keys']:.0f} keys)" if "epsilon" in row else ""))
        lines.append((titles[method], *cells))
    own = [row for row in rows if row["at"] is None]
    note = passes_curve.__doc__ or ""
    for row in own:
        note += (
            f"\nCertified with ε = {row['epsilon']:g}: error {row['attention_error']:.4f}, {row['keys']:.0f} keys, "
            f"{row['bytes']:.0f} bytes a query head, {row['exact']:.1%} of the heads exact."
        )
    title = f"Attention error against k with Flat: {text}, n = {n}"
    return Section(title, note, ("attention", *(f"k = {k}" for k in ks)), lines)


def alarms(rows: Sequence[Row]) -> list[str]:
    """Where SoftmaxLift does not beat TopK and TopK + Sampling in attention error, as the paper reports."""
    errors: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row["part"] == "curve" and row["at"] == row["k"] and row["attention_error"] is not None:
            errors[f"{row['text']}, n = {row['n']}, Flat"][row["method"]].append(row["attention_error"])
        elif row["part"] == "accuracy" and row["strategy"]:
            where = f"examples, n = {row['n']}, {row['oracle']}"
            errors[where][row["strategy"]].append(row["attention_error"])
    told = []
    for place, methods in errors.items():
        for rival in ("top_k", "top_k_sampling"):
            if "softmax_lift" in methods and rival in methods:
                ours, theirs = (float(np.mean(methods[name])) for name in ("softmax_lift", rival))
                if not ours < theirs:
                    told.append(
                        f"{place}: SoftmaxLift's attention error of {ours:.4f} is not below {_NAMES[rival]}'s "
                        f"{theirs:.4f}"
                    )
    return told
