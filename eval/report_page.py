"""The HTML page of a report: one file without scripts or outside resources; plots are SVG, drawn by matplotlib."""

import dataclasses
import html
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1b1f24; margin: 0 auto; max-width: 1200px; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.table { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #d8dde3; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { position: sticky; top: 0; background: #fff; }
tr.ours { background: #e8f3ff; font-weight: 600; } .note { color: #444c56; max-width: 75ch; white-space: pre-line; }
.alarm { background: #ffe3e3; border-left: 4px solid #c00; padding: .5rem 1rem; }
.fine { background: #e6f6ea; border-left: 4px solid #2a8a43; padding: .5rem 1rem; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem; }
dd { overflow-wrap: anywhere; } details { margin: .5rem 0; }
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A table.

    Attributes:
      title: heading.
      note: what is particular to this table.
      columns: headings.
      lines: cells.
      protocol: how the numbers were made.
    """

    title: str
    note: str
    columns: Sequence[str]
    lines: Sequence[Sequence[str]]
    protocol: str = ""


def page(
    sections: Sequence[Section],
    warnings: Sequence[str],
    facts: Sequence[tuple[str, str]],
    rows: Sequence[Row],
    speed: Sequence[Row],
) -> str:
    """The whole page.

    Args:
      sections: tables.
      warnings: alarms.
      facts: what the numbers depend on.
      rows: of the run, for the plots.
      speed: rows of `certjax bench`, or none.
    """
    escape = html.escape
    notices = [f'<p class="alarm">Alarm: {escape(warning)}</p>' for warning in warnings]
    notices = notices or ['<p class="fine">No alarms.</p>']
    terms = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts)
    body = [
        "<h1>certjax evaluation</h1>",
        *notices,
        f"<details><summary>What the numbers depend on</summary><dl>{terms}</dl></details>",
        *_figures(rows, speed),
        *(_table(section) for section in sections),
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>certjax evaluation</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _table(section: Section) -> str:
    cells = lambda tag, line: "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in line)
    body = "".join(
        f"<tr{' class=ours' if 'certjax' in line[0] else ''}>{cells('td', line)}</tr>" for line in section.lines
    )
    return (
        f"<h2>{html.escape(section.title)}</h2><details><summary>How this was measured</summary>"
        f'<p class="note">{html.escape(section.protocol.strip())}</p></details>'
        f'<p class="note">{html.escape(section.note)}</p>'
        f'<div class="table"><table><thead><tr>{cells("th", section.columns)}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _figures(rows: Sequence[Row], speed: Sequence[Row]) -> list[str]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["<p>No plots: matplotlib is not installed (pip install certjax[bench]).</p>"]
    parts = lambda name: [row for row in rows if row["part"] == name]
    drawn = []
    for draw, found, caption in (
        (_draw_errors, [row for row in parts("error") if row["budget"] is not None],
         "Error against keys. A dot is the 90th percentile over heads, a line reaches from the median to the largest."),
        (_draw_histogram, parts("audit"),
         "Observed error over allowed error of all sampled, certified calls; right of 1 would be violations."),
        (_draw_heads, parts("audit"),
         "Keys read by layer and query head, value measure (heads sampled where possible)."),
        (_draw_speed, [row for row in speed if row["largest_error_over_scale"] is not None],
         "Own dense attention's time over a method's, by context length."),
    ):  # fmt: skip
        if found:
            figure = Figure(figsize=(11, 5), layout="constrained")
            draw(figure, found)
            file = io.StringIO()
            figure.savefig(file, format="svg", metadata={"Date": None})
            svg = file.getvalue()
            drawn.append(f"<figure>{svg[svg.index('<svg') :]}<figcaption>{html.escape(caption)}</figcaption></figure>")
    return drawn


def _panels(figure: Any, count: int, **options: Any) -> list[Any]:
    """So many axes, two beside each other, legible on a narrow page."""
    lines = -(-count // 2)
    figure.set_size_inches(11, 4.5 * lines)
    panels = figure.subplots(lines, min(count, 2), squeeze=False, **options).ravel()
    for unused in panels[count:]:
        unused.remove()
    return list(panels[:count])


def _draw_errors(figure: Any, rows: Sequence[Row]) -> None:
    sizes = sorted({row["n"] for row in rows})
    names = list(dict.fromkeys(row["title"] for row in rows if row["method"] != "dense"))
    panels = _panels(figure, len(sizes), sharex=True, sharey=True)
    for axes, n in zip(panels, sizes, strict=True):
        for i, name in enumerate(names):
            here = [row for row in rows if row["n"] == n and row["title"] == name and row["match"] == "keys"]
            ours = bool(here) and here[0]["method"] == "certified"
            color, marker = f"C{i % 10}", "os^vDPX*<>"[i // 10 % 10]
            for k, epsilon in enumerate(sorted({row["epsilon"] for row in here})):
                error = np.concatenate([row["errors"] for row in here if row["epsilon"] == epsilon])
                keys = np.mean([row["keys"] for row in here if row["epsilon"] == epsilon])
                median, p90 = np.percentile(error, (50, 90))
                line = {"color": "black" if ours else color, "lw": 2.5 if ours else 0.8, "alpha": 1 if ours else 0.6}
                axes.plot([keys, keys], [median, error.max()], **line)
                label = name if k == 0 else None
                axes.plot(keys, p90, marker, color=line["color"], ms=8 if ours else 4, label=label)
        axes.set(yscale="log", xlabel="keys a query head", ylabel="error / M", title=f"n = {n}")
        axes.grid(alpha=0.3)
    handles = {label: h for axes in panels for h, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", fontsize=6)


def _draw_histogram(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    edges = np.linspace(0, 1.2, 49)
    for measure in dict.fromkeys(row["measure"] for row in rows):
        counts = np.sum([row["histogram"] for row in rows if row["measure"] == measure], axis=0)
        axes.stairs(np.maximum(counts, 0.5), edges, label=measure, lw=1.5)
    axes.axvline(1, color="#c00", ls="--", lw=1)
    axes.set(yscale="log", xlabel="error / allowed error", ylabel="calls", ylim=(0.5, None))
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_heads(figure: Any, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["measure"] == "value"] or list(rows)
    epsilon = min((row["epsilon"] for row in rows), key=lambda x: abs(x - 0.1))
    sizes = sorted({row["n"] for row in rows})
    for axes, n in zip(_panels(figure, len(sizes)), sizes, strict=True):
        here = [row["keys_by_layer_and_head"] for row in rows if row["n"] == n and row["epsilon"] == epsilon]
        keys = np.maximum(np.mean(here, axis=0), 1)
        image = axes.imshow(np.log10(keys).T, aspect="auto", cmap="viridis")
        axes.set(title=f"n = {n}, ε = {epsilon:g}, {len(here)} texts", xlabel="layer", ylabel="query head")
        figure.colorbar(image, ax=axes, label="log₁₀ keys")


def _draw_speed(figure: Any, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    for i, key in enumerate(
        dict.fromkeys((row["kind"], row["d"], row["g"], row["method"], row["epsilon"]) for row in rows)
    ):
        for data, style in (("cold", "-"), ("warm", ":")):
            same = [
                r for r in rows if (r["kind"], r["d"], r["g"], r["method"], r["epsilon"], r["data"]) == (*key, data)
            ]
            points = sorted((row["n"], row["dense_over_this"]) for row in same)
            kind, d, g, method, epsilon = key
            label = f"{kind}, d {d}, g {g}: {method}" + ("" if epsilon is None else f", ε {epsilon:g}") + f", {data}"
            if points:
                axes.plot(*zip(*points, strict=True), style, marker=".", color=f"C{i}", label=label)
    axes.set(xscale="log", yscale="log", xlabel="keys n", ylabel="own dense ÷ method (times faster)")
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right center", fontsize=6)
