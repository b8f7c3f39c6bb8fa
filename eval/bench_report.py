"""What `certjax bench` prints and draws, and what it asks the machine."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# Heading, width, and how a row fills it.
COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    ("kind", 7, lambda r: r["kind"]),
    ("n", 7, lambda r: f"{r['n']}"),
    ("d", 3, lambda r: f"{r['d']}"),
    ("g", 2, lambda r: f"{r['g']}"),
    ("data", 4, lambda r: r["data"]),
    ("method", 28, lambda r: r["method"]),
    ("ε", 4, lambda r: _number(r["epsilon"], "g")),
    ("µs", 9, lambda r: f"{r['time_us']:.1f}"),
    ("ns/key", 7, lambda r: f"{r['ns_per_key']:.2f}"),
    ("dense ÷ this (80 %)", 20, lambda r: _ratio(r)),
    ("kernels", 7, lambda r: _number(r["dense_over_this_kernels"], ".2f")),
    ("bytes", 6, lambda r: f"{r['bytes_share']:.1%}"),
    ("keys", 7, lambda r: _number(r["keys_read"], ".0f")),
    ("cand.", 7, lambda r: _number(r["candidates"], ".0f")),
    ("exact", 6, lambda r: _number(r["exact_share"], ".1%")),
    ("scan/reads/cert.", 16, lambda r: _shares(r["parts"] if r["epsilon"] else None)),
    ("GB/s", 6, lambda r: f"{r['gb_per_s']:.1f}"),
    ("error/M", 7, lambda r: _number(r["largest_error_over_scale"], ".0e")),
)
_NOTES = """\
One decode step of one kv head with its g query heads, bfloat16 keys and values: medians over the repetitions, averaged
over the kv heads. "dense" is own dense decode: above 1, a method is faster (80 %: interval over resampled repetitions);
kernels: the same ratio of the time in native kernels alone, over all threads, without what a call takes beside them.
bytes: what a call must read against all keys and values (certified: what its certificate counts). keys, cand.: keys and
candidates read a query head. scan/reads/cert.: percent of the native step's own time, all threads; the rest of 100 is
exact attention, and what the call takes beside it is not in it. error/M: the largest one observed. Threads cannot be
set in the process: choose CPUs before it starts, as in `taskset -c 0 certjax bench`.
"""


def _number(x: float | None, form: str) -> str:
    return "–" if x is None else format(x, form)


def _shares(parts: dict[str, float] | None) -> str:
    if parts is None:
        return "–"
    total = sum(parts.values())
    return "/".join(f"{100 * parts[name] / total:.0f}" for name in ("scan", "reads", "certificate"))


def _ratio(row: Row) -> str:
    low, high = row["dense_over_this_interval"]
    return f"{row['dense_over_this']:.2f} ({low:.2f} … {high:.2f})"


def _line(cells: Sequence[str]) -> str:
    pairs = zip(cells, COLUMNS, strict=True)
    return "| " + " | ".join(f"{cell:<{width}}" for cell, (_, width, _) in pairs) + " |"


def print_head(facts: Sequence[tuple[str, str]], repeats: int, delta: float) -> None:
    """Prints what the numbers depend on, and the head of the table."""
    facts = [*facts, ("repetitions", str(repeats)), ("δ a call and head", f"{delta:g}")]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {value}")
    print(f"\n{_NOTES}")
    print(_line([heading for heading, _, _ in COLUMNS]))
    print("|" + "|".join("-" * (width + 2) for _, width, _ in COLUMNS) + "|", flush=True)


def print_rows(rows: Sequence[Row]) -> None:
    """Prints rows of the table."""
    for row in rows:
        print(_line([fill(row) for _, _, fill in COLUMNS]), flush=True)


def check_file(path: str | None) -> None:
    """Raises ValueError, before anything is measured, if a file cannot be made where it is wanted."""
    if path is not None and not Path(path).parent.is_dir():
        raise ValueError(f"{path}: there is no folder {Path(path).parent}; make it first")


def plotter(path: str | None) -> Callable[[Sequence[Row]], None]:
    """A function that draws own dense over each method by n into the file; it does nothing if path is None.

    Without matplotlib it says so, and does nothing either.

    Raises:
      ValueError: neither .png nor .svg, or no such folder.
    """
    if path is None:
        return lambda rows: None
    check_file(path)
    if Path(path).suffix not in (".png", ".svg"):
        raise ValueError(f"plot must be a .png or .svg file: got {path}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: matplotlib is not installed (pip install certjax[bench])")
        return lambda rows: None
    return lambda rows: _plot(path, rows, Figure)


def _plot(path: str, rows: Sequence[Row], figure_class: Any) -> None:
    """A panel a kind and shape; solid lines are cold, dotted ones warm."""
    rows = [row for row in rows if row["largest_error_over_scale"] is not None]  # attention, not limits
    panels = sorted({(row["d"], row["g"], row["kind"]) for row in rows})
    names = list(dict.fromkeys((row["method"], row["epsilon"]) for row in rows))
    figure = figure_class(figsize=(6 * len(panels), 5), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        here = [row for row in rows if (row["d"], row["g"], row["kind"]) == panel]
        for i, (method, epsilon) in enumerate(names):
            for data, style in (("cold", "-"), ("warm", ":")):
                points = sorted(
                    (row["n"], row["dense_over_this"])
                    for row in here
                    if (row["method"], row["epsilon"], row["data"]) == (method, epsilon, data)
                )
                label = method if epsilon is None else f"{method}, ε {epsilon:g}"
                axes.plot(*zip(*points, strict=True), style, marker=".", color=f"C{i}", label=f"{label}, {data}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set(title="{2}, d {0}, g {1}".format(*panel), xlabel="keys n", ylabel="own dense ÷ method (times faster)")
        axes.grid(alpha=0.3)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path)


def processor() -> dict[str, str]:
    """The model and last-level cache of the first CPU, as far as Linux tells."""
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        match = None
    return {"CPU": match[1] if match else "unknown", "L3 cache": f"{l3_bytes() / 2**20:.0f} MiB"}


def l3_bytes() -> int:
    """Size of the largest cache of the first CPU; 64 MiB where that cannot be read."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", file.read_text(encoding="utf-8").strip())
        if match:
            sizes.append(int(match[1]) << {"K": 10, "M": 20}[match[2]])
    return max(sizes, default=64 << 20)


def free_bytes() -> int | None:
    """Memory that can be taken without swapping; None where that cannot be read."""
    try:
        match = re.search(r"MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
    except OSError:
        return None
    return int(match[1]) << 10 if match else None
