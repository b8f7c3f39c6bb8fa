"""`certjax report RUN_DIR`: tables, plots and alarms of a run, as one HTML page, as Markdown and as JSON."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from certjax.eval import agreement, audit, divergence, errors, report_page
from certjax.eval.run_folder import read_rows

Row = dict[str, Any]
SIGNIFICANCE = 0.01  # of the alarms about arms that beat dense attention, over all of them together


def write(folder: str) -> str:
    """Writes report.html, report.md and report.json into the folder of a run.

    Args:
      folder: of `certjax eval` or `certjax audit`. A bench.json in it (`certjax bench --json`) is drawn too.

    Returns:
      What to print: the alarms, and where the page is.

    Raises:
      ValueError: no run in the folder.
    """
    rows = read_rows(folder)
    if not rows:
        raise ValueError(f"{folder}: the run has no rows yet; give it time, or start it again")
    sections, warnings = make_sections(rows), alarms(rows)
    bench = Path(folder) / "bench.json"
    speed = json.loads(bench.read_text(encoding="utf-8"))["rows"] if bench.is_file() else []
    out = Path(folder)
    facts = provenance(rows)
    (out / "report.md").write_text(markdown(sections, warnings, facts), encoding="utf-8")
    (out / "report.html").write_text(report_page.page(sections, warnings, facts, rows, speed), encoding="utf-8")
    tables = {s.title: [dict(zip(s.columns, line, strict=True)) for line in s.lines] for s in sections}
    content = {"provenance": dict(facts), "alarms": warnings, "tables": tables}
    (out / "report.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    told = [f"ALARM: {warning}" for warning in warnings] or ["no alarms"]
    return "\n".join([*told, f"{out / 'report.html'} (and .md, .json): {len(rows)} rows"])


def provenance(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What the numbers depend on; several values where rows differ."""
    seen: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        for name, value in row["stamp"].items():
            if str(value) not in seen[name]:
                seen[name].append(str(value))
        text = f"{row['text']}: {row['source']}, sha256 {row['text_sha256']}"
        if text not in seen["texts"]:
            seen["texts"].append(text)
    return [(name, "; ".join(values)) for name, values in seen.items()]


def make_sections(rows: Sequence[Row]) -> list[report_page.Section]:
    """The tables of the parts that a run has."""
    parts: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        parts[row["part"]].append(row)
    make = {"error": _error_sections, "audit": _audit_section, "ppl": _ppl_section, "agreement": _agreement_section}
    return [section for part, function in make.items() if parts[part] for section in function(parts[part])]


def pooled(rows: Iterable[Row]) -> Row:
    """Error rows of one method over several texts as one."""
    rows = list(rows)
    found = [row for row in rows if row["budget"] is not None]
    base = {name: rows[0][name] for name in ("method", "title", "family")} | {"settings": len(found), "of": len(rows)}
    if not found:
        return base | {name: None for name in ("keys", "bytes", "median", "p90", "p99", "max")}
    error = np.concatenate([row["errors"] for row in found])
    cost = {name: float(np.mean([row[name] for row in found])) for name in ("keys", "bytes")}
    median, p90, p99 = np.percentile(error, (50, 90, 99))
    return base | cost | {"median": median, "p90": p90, "p99": p99, "max": error.max(), "heads": len(error)}


def _error_sections(rows: Sequence[Row]) -> list[report_page.Section]:
    sections = []
    columns = ("method", "keys a head", "bytes a head", "median", "p90", "p99", "max", "p90 ÷ ours", "max ÷ ours")
    for n, epsilon in sorted({(row["n"], row["epsilon"]) for row in rows}):
        for match in ("keys", "bytes"):
            here = [row for row in rows if (row["n"], row["epsilon"]) == (n, epsilon)]
            # Ours, the paper's bounds and dense attention are matched to nothing: they stand in both tables.
            groups = _by(
                row for row in here if row["match"] == match or row["family"] == "certified" or row["method"] == "dense"
            )
            lines = [pooled(group) for group in groups.values()]
            ours = next((line for line in lines if line["method"] == "certified"), None)
            lines.sort(key=lambda line: (line["p90"] is None, line["p90"] or 0))
            texts = len({row["text"] for row in here})
            what = "1.1 × our keys" if match == "keys" else "our bytes"
            sections.append(
                report_page.Section(
                    f"Error / M at matched {match}: n = {n}, ε = {epsilon:g}",
                    f"{texts} texts pooled; rivals read at most {what}; dense attention and "
                    "both certificates stand beside them, matched to nothing. – : even the "
                    "smallest setting of the method costs more.",
                    columns,
                    [
                        (
                            line["title"]
                            + ("" if line["settings"] in (0, line["of"]) else f" ({line['settings']} texts)"),
                            *(_number(line[name], ".0f") for name in ("keys", "bytes")),
                            *(_number(line[name], ".4f") for name in ("median", "p90", "p99", "max")),
                            *(_ratio(line[name], ours[name] if ours else None) for name in ("p90", "max")),
                        )
                        for line in lines
                    ],
                    errors.__doc__ or "",
                )
            )
    return sections


def _by(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["method"]].append(row)
    return groups


def _audit_section(rows: Sequence[Row]) -> list[report_page.Section]:
    calls, violations = (sum(row[name] for row in rows) for name in ("calls", "violations"))
    low, high = audit.binomial_interval(violations, calls)
    columns = (
        "text", "n", "measure", "ε", "sampled calls", "exact", "refused", "violations", "rate, 99 % interval",
        "largest error / ε", "p99", "bound / error", "worst (layer.head)", "keys a head", "keys where sampled",
    )  # fmt: skip
    lines = [
        (
            row["text"], str(row["n"]), row["measure"], f"{row['epsilon']:g}", str(row["calls"]), str(row["exact"]),
            str(row["refused"]), str(row["violations"]), f"{row['interval'][0]:.1e} … {row['interval'][1]:.1e}",
            f"{row['largest']:.3f}", _number(row["p99"], ".3f"), _number(row["tightness"], ".1f"),
            f"{row['worst']['layer']}.{row['worst']['head']}", f"{row['keys']:.0f}",
            _number(row["keys_sampled"], ".0f"),
        )
        for row in rows
    ]  # fmt: skip
    note = (
        f"All rows together: {violations} violations in {calls} sampled calls, a rate of "
        f"{low:.1e} … {high:.1e} (99 % interval); δ was {rows[0]['delta']:g}."
    )
    return [report_page.Section("Audit of the certificate", note, columns, lines, audit.__doc__ or "")]


def _ppl_section(rows: Sequence[Row]) -> list[report_page.Section]:
    columns = (
        "text", "n", "method", "ε", "perplexity", "dense", "difference", "KL mean", "KL 99.9 %", "KL max",
        "same top token", "keys a head", "exact heads",
    )  # fmt: skip
    lines = [
        (
            row["text"], str(row["n"]), row["method"], _number(row.get("epsilon"), "g"),
            *(_number(row.get(name), form) for name, form in (
                ("perplexity", ".4f"), ("perplexity_dense", ".4f"), ("relative_difference", "+.3%"), ("kl_mean", ".1e"),
                ("kl_p999", ".1e"), ("kl_max", ".1e"), ("top1_agreement", ".1%"), ("keys", ".0f"),
                ("exact_share", ".0%"),
            )),
        )
        for row in rows
    ]  # fmt: skip
    return [report_page.Section("Perplexity and divergence", "", columns, lines, divergence.__doc__ or "")]


def _agreement_section(rows: Sequence[Row]) -> list[report_page.Section]:
    columns = ("text", "n", "mode", "ε", "new tokens", "same as dense", "first difference", "exact heads")
    lines = [
        (
            row["text"], str(row["n"]), f"{row['mode']} ({row['temperature']:g})", f"{row['epsilon']:g}",
            str(row["new_tokens"]), f"{row['same']:.0%}",
            "none" if row["first_difference"] is None else str(row["first_difference"]), f"{row['exact_share']:.0%}",
        )
        for row in rows
    ]  # fmt: skip
    return [report_page.Section("Agreement of generated texts", "", columns, lines, agreement.__doc__ or "")]


def alarms(rows: Sequence[Row]) -> list[str]:
    """What must not be: a broken certificate, a sparse arm that beats dense attention, oracles out of order."""
    found = [
        f"{row['id']}: {row['violations']} violations in {row['calls']} calls exceed δ = {row['delta']:g}"
        for row in rows
        if row["part"] == "audit" and not row["holds"]
    ]
    settings: dict[tuple[str, int], dict[str, Row]] = defaultdict(dict)
    significant = norm.isf(SIGNIFICANCE / max(sum(row["part"] == "ppl" for row in rows), 1))
    for row in rows:
        if row["part"] != "ppl" or row["perplexity"] is None:
            continue
        settings[row["text"], row["n"]][row["method"]] = row
        error = row["nll_difference_error"]
        if row["nll_difference"] < -significant * error and error > 0:
            found.append(
                f"{row['id']}: predicts better than dense attention by {-row['nll_difference'] / error:.1f} standard "
                "errors; sparse attention has no way to know more"
            )
    for (text, n), methods in settings.items():
        order = [
            name for name in ("dense", "oracle_topk, 5% of the keys", "oracle_topk, 2% of the keys") if name in methods
        ]
        for better, worse in itertools.pairwise(order):
            a, b = (methods[name]["kl_mean"] for name in (better, worse))
            if a > b:
                found.append(f"{text}, n = {n}: {better} diverges more than {worse} ({a:.2e} against {b:.2e})")
    return found


def markdown(sections: Sequence[report_page.Section], warnings: Sequence[str], facts: Sequence[tuple[str, str]]) -> str:
    """The report as Markdown."""
    lines = ["# certjax evaluation", ""]
    lines += [f"* **ALARM**: {warning}" for warning in warnings] or ["No alarms."]
    lines += ["", *(f"* {name}: {value}" for name, value in facts)]
    told = None
    for section in sections:
        lines += ["", f"## {section.title}", ""]
        if section.protocol != told:
            lines += [section.protocol.strip(), ""]
            told = section.protocol
        lines += [section.note, ""] if section.note else []
        lines += [f"| {' | '.join(section.columns)} |"]
        lines += ["|" + "---|" * len(section.columns), *(f"| {' | '.join(line)} |" for line in section.lines)]
    return "\n".join(lines) + "\n"


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def _ratio(x: float | None, ours: float | None) -> str:
    return "–" if x is None or not ours else f"{x / ours:.1f}"
