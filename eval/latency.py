"""`certjax bench`: how long one decode step of one kv head takes, certified, dense and with what else JAX users have.

Protocol. Every method is one compiled program a shape. In every repetition, for every kv head, the methods take turns;
each first runs untimed at the position before the timed one, which compiles it, warms it, and gives the certified step
its hint; its perturbations are fresh every time. Warm: the timed call follows at once, so that caches hold what fits.
Cold: the caches are emptied by reading a buffer of four times the L3 cache, then the method runs on another kv head,
so that its code is warm as in a model of many layers, then the timed call on data that is not. A time is the median
over the repetitions, averaged over the kv heads; ratios are to own dense of the same run.
"""

import dataclasses
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import certjax
from certjax.eval import bench_plan, bench_report, doctor
from certjax.eval.bench_inputs import Case, Head, make_heads
from certjax.eval.bench_methods import Method, methods, output_of, read_all, task_times
from certjax.eval.replay import dense_output


def run(
    *,
    full: bool = False,
    n: Sequence[str] | None = None,
    d: Sequence[int] | None = None,
    g: Sequence[int] | None = None,
    epsilon: Sequence[float] | None = None,
    kinds: Sequence[str] | None = None,
    repeats: int | None = None,
    checkpoint: str | None = None,
    prompt_file: str | None = None,
    cache_dir: str | None = None,
    implementation: str | None = None,
    json_file: str | None = None,
    plot_file: str | None = None,
) -> dict[str, Any]:
    """Measures, prints a table, writes JSON and a plot where asked to, and returns what is written as JSON.

    Args:
      full: the whole grid instead of the quick one, for what is not given below.
      n: cache lengths, multiples of 64, such as "4096", "4K" or "1M".
      d: head dims, multiples of 16.
      g: query heads a kv head, for every d; default by d: 3 at 64, 4 elsewhere, and 1 in the full grid.
      epsilon: allowed errors of the certified step, value measure; δ is 1e-3 a call and query head.
      kinds: of "real", "diffuse", "peaked"; default all, "real" if there is a checkpoint or cache_dir.
      repeats: repetitions.
      checkpoint: folder of a model that makes real caches.
      prompt_file: text that the model reads; None for the language reference that every CPython carries.
      cache_dir: folder of stored real caches (`bench_inputs.stored`).
      implementation: of the certified step; None for what `decode_attention` picks.
      json_file: written at the end: environment, settings, rows (with the single times), skipped cases.
      plot_file: .png or .svg; needs matplotlib.

    Raises:
      ValueError: an argument that is out of range, or a file or folder that is missing or cannot be used.
    """
    plan = bench_plan.make_plan(
        full=full, n=n, d=d, g=g, epsilon=epsilon, kinds=kinds, repeats=repeats,
        real=checkpoint is not None or cache_dir is not None, implementation=implementation,
    )  # fmt: skip
    bench_report.check_file(json_file)
    plot = bench_report.plotter(plot_file)
    cases, skipped = bench_plan.find_cases(plan, checkpoint, prompt_file, cache_dir)
    settings = dataclasses.asdict(plan)
    environment = dict(doctor.report()) | bench_report.processor()
    sources = list(dict.fromkeys((f"{case.kind} caches", case.source) for case in cases))
    bench_report.print_head([*environment.items(), *sources], plan.repeats, plan.delta)
    flush = np.zeros(4 * bench_report.l3_bytes() // 2, np.uint16)
    flush[:] = 1  # untouched zero pages all share one page of memory
    everything = methods(plan.implementation, plan.epsilons, plan.delta)
    rows: list[dict[str, Any]] = []
    result = {"environment": environment, "settings": settings, "rows": rows, "skipped": skipped}
    for case in cases:
        need, free = case.memory() + flush.nbytes, bench_report.free_bytes()
        if free is not None and need > 0.8 * free:
            skipped.append(
                f"{case.kind}, n {case.n}, d {case.d}, g {case.g}: needs about {need / 2**30:.1f} GiB of memory, "
                f"{free / 2**30:.1f} GiB are free"
            )
            continue
        heads = make_heads(case)
        if len(heads) == 1:
            skipped.append(f"{case.kind}, n {case.n}, cold: needs two kv heads, {case.source} has one")
        for cold in (False, True)[: len(heads)]:
            new = measure(case, heads, everything, plan.repeats, (lambda: read_all(flush)) if cold else None)
            bench_report.print_rows(new)
            rows += new
        del heads  # before the next ones are made
        _write(json_file, result)  # after every case: the whole grid takes hours
    for line in skipped:
        print(f"skipped: {line}")
    _write(json_file, result)
    if rows:
        plot(rows)
    return result


def _write(file: str | None, result: dict[str, Any]) -> None:
    if file is not None:
        Path(file).write_text(json.dumps(result, indent=1), encoding="utf-8")


def measure(
    case: Case, heads: Sequence[Head], methods: Sequence[Method], repeats: int, flush: Callable[[], None] | None
) -> list[dict[str, Any]]:
    """Times methods, one of them named "dense", in turns; a row for each, as `bench_report.COLUMNS` reads it.

    Args:
      case: what the heads are of.
      heads: at least two where `flush` is given, one otherwise.
      methods: what takes turns.
      repeats: repetitions.
      flush: empties the caches; None for warm.
    """
    times = np.zeros((len(methods), repeats, len(heads)))
    kernels = np.zeros_like(times)
    previous: dict[tuple[int, int], Any] = {}
    results: list[list[Any]] = [[] for _ in methods]
    parts: list[Counter[str]] = [Counter() for _ in methods]
    positions = min(len(head.steps) for head in heads)
    for r in range(repeats):
        t = 1 + r % (positions - 1)
        for h, head in enumerate(heads):
            for m, method in enumerate(methods):
                before, _ = _call(method, head, t - 1, previous.get((m, h)))
                if flush is not None:
                    other = (h + 1) % len(heads)
                    flush()
                    _call(method, heads[other], t, previous.get((m, other)))
                start = Counter(task_times())
                previous[m, h], times[m, r, h] = _call(method, head, t, before)
                spent = Counter(task_times()) - start
                kernels[m, r, h] = spent.total()
                parts[m].update(spent)
                results[m].append(previous[m, h])
    errors = [0.0] * len(methods)
    for h, head in enumerate(heads):
        query, cache = head.steps[-1]  # the only step at which everyone attends the same keys
        output, scale = (np.asarray(x)[0] for x in _exact(query, cache))
        for m, method in enumerate(methods):
            if method.attends:
                result, _ = _call(method, head, -1, previous[m, h])
                error = np.linalg.norm(output_of(result) - output, axis=-1) / scale
                errors[m] = max(errors[m], float(error.max()))
    dense = [method.name for method in methods].index("dense")
    facts = {key: getattr(case, key) for key in ("kind", "source", "n", "d", "g", "heads")}
    facts |= {"data": "warm" if flush is None else "cold"}
    return [
        facts
        | _row(case, method, times[m], times[dense], results[m], parts[m], errors[m] if method.attends else None)
        | {"dense_over_this_kernels": _kernels_ratio(kernels[dense], kernels[m])}
        for m, method in enumerate(methods)
    ]


_exact = jax.jit(functools.partial(dense_output, config=certjax.Config()))


def _parts(parts: Counter[str], calls: int) -> dict[str, float] | None:
    """Microseconds a call of a native step's parts, over all threads and without the call itself; None for others."""
    if not parts:
        return None
    names = {"scan": ("prepare", "scan"), "reads": ("read",), "certificate": ("evaluate",), "dense": ("dense",)}
    return {name: sum(parts[kind] for kind in kinds) / 1e3 / calls for name, kinds in names.items()}


def _kernels_ratio(dense: np.ndarray, kernels: np.ndarray) -> float | None:
    """Of the time in kernels alone, summed over threads: medians over the repetitions, summed over kv heads."""
    spent = np.median(kernels, 0).sum()
    return float(np.median(dense, 0).sum() / spent) if spent else None


def _call(method: Method, head: Head, t: int, previous: Any) -> tuple[Any, int]:
    """The result, and the nanoseconds that it took."""
    function, arguments = method.prepare(head, t, previous)
    start = time.perf_counter_ns()
    result = jax.block_until_ready(function(*arguments))
    return result, time.perf_counter_ns() - start


def _row(
    case: Case,
    method: Method,
    times: np.ndarray,
    dense: np.ndarray,
    results: list[Any],
    parts: Counter[str],
    error: float | None,
) -> dict[str, Any]:
    """What one method did; `times` and `dense` are nanoseconds [repetitions, kv heads], `parts` those of its tasks."""
    total = np.median(times, 0).sum()
    again = np.random.default_rng(0).integers(len(times), size=(200, len(times)))  # bootstrap over the repetitions
    low, high = np.percentile(np.median(dense[again], 1).sum(1) / np.median(times[again], 1).sum(1), (10, 90))
    dense_bytes = 4 * case.n * case.d  # bfloat16 keys and values of one kv head
    keys = candidates = exact = None
    if method.share is not None:
        bytes_read = method.share * dense_bytes
    else:
        certificates = [jax.tree.map(np.asarray, result.certificate) for result in results]
        mean = lambda name: float(np.mean([getattr(c, name) for c in certificates]))
        bytes_read = mean("bytes_read") * case.g  # each query head reports its share of the group's reads
        keys, candidates, exact = mean("keys_read"), mean("candidates"), mean("exact")
    time_ns = total / case.heads
    return {
        "method": method.name,
        "epsilon": method.epsilon,
        "time_us": float(time_ns / 1e3),
        "ns_per_key": float(time_ns / case.n),
        "dense_over_this": float(np.median(dense, 0).sum() / total),
        "dense_over_this_interval": [float(low), float(high)],
        "bytes_read": float(bytes_read),
        "bytes_share": float(bytes_read / dense_bytes),
        "keys_read": keys,
        "candidates": candidates,
        "exact_share": exact,
        "gb_per_s": float(bytes_read / time_ns),
        "parts": _parts(parts, len(results)),
        "largest_error_over_scale": error,
        "times_us": (times / 1e3).round(2).tolist(),
    }
