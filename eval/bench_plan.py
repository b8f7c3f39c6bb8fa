"""What `certjax bench` measures: the grid, its checks, and where the caches come from."""

import dataclasses
import re
from collections.abc import Sequence

import certjax
from certjax.eval.bench_inputs import SIGMA, Case, stored, synthetic
from certjax.eval.bench_model import model_cases
from certjax.types import BLOCK

KINDS = ("real", *SIGMA)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The grid.

    Attributes:
      sizes: cache lengths n.
      shapes: (d, g), head dim and query heads a kv head.
      epsilons: of the certified step, value measure.
      kinds: of caches.
      repeats: repetitions.
      implementation: of the certified step.
      delta: of the certified step, per call and query head.
    """

    sizes: Sequence[int]
    shapes: Sequence[tuple[int, int]]
    epsilons: Sequence[float]
    kinds: Sequence[str]
    repeats: int
    implementation: str
    delta: float = 1e-3

    def __post_init__(self):
        """Raises ValueError for what is out of range."""
        for d, g in self.shapes:
            if d % 16 or not 16 <= d <= 512:
                raise ValueError(f"d must be a multiple of 16 between 16 and 512: got {d}")
            if not 1 <= g <= 16:
                raise ValueError(f"g must lie in 1 … 16: got {g}")
        for epsilon in self.epsilons:
            certjax.Config(epsilon=epsilon)
        for kind in self.kinds:
            if kind not in KINDS:
                raise ValueError(f"kinds must be among {', '.join(KINDS)}: got {kind!r}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be at least 1: got {self.repeats}")


# Quick and full: n, g by d, epsilons, repetitions; the groups at d 128 stand for every other d.
_GRIDS: dict[bool, tuple[tuple[str, ...], dict[int, tuple[int, ...]], tuple[float, ...], int]] = {
    False: (("8K", "32K", "128K"), {64: (3,), 128: (4,)}, (0.1, 0.2), 5),
    True: (tuple(f"{1 << i}K" for i in range(2, 11)), {64: (1, 3), 128: (1, 4)}, (0.05, 0.1, 0.2, 0.3), 9),
}


def make_plan(
    *,
    full: bool,
    n: Sequence[str] | None,
    d: Sequence[int] | None,
    g: Sequence[int] | None,
    epsilon: Sequence[float] | None,
    kinds: Sequence[str] | None,
    repeats: int | None,
    real: bool,
    implementation: str | None,
) -> Plan:
    """The quick grid or the whole one, with what is given instead; arguments as for `latency.run`.

    Args:
      real: whether there is a source of real caches.

    Raises:
      ValueError: an argument is out of range, or the implementation cannot run here.
    """
    sizes, groups, epsilons, count = _GRIDS[full]
    plan = Plan(
        sizes=sorted({parse_size(x) for x in n or sizes}),
        shapes=[(H, G) for H in sorted(set(d or (64, 128))) for G in g or groups.get(H, groups[128])],
        epsilons=sorted(set(epsilon or epsilons)),
        kinds=list(kinds or (KINDS if real else SIGMA)),
        repeats=count if repeats is None else repeats,
        implementation=certjax.choose_implementation(implementation),
    )
    if "real" in plan.kinds and not real:
        raise ValueError('kind "real" needs caches: give --checkpoint or --cache-dir')
    return plan


def parse_size(text: str) -> int:
    """Keys of a cache from "4096", "4K" or "1M".

    Raises:
      ValueError: not a number of that form, not a multiple of 64, or below 256.
    """
    match = re.fullmatch(r"(\d{1,9})([KkMm]?)", text)
    number = int(match[1]) * {"": 1, "K": 1 << 10, "M": 1 << 20}[match[2].upper()] if match else 0
    if number < 256 or number % BLOCK:
        raise ValueError(f"n must be a multiple of {BLOCK} and at least 256, such as 4096, 4K or 1M: got {text!r}")
    return number


def find_cases(
    plan: Plan, checkpoint: str | None, prompt_file: str | None, cache_dir: str | None
) -> tuple[list[Case], list[str]]:
    """The plan's cases, real ones first, and a line for every real one that there is not.

    Raises:
      ValueError: a checkpoint, text or folder that is missing or cannot be used.
    """
    found: list[Case] = []
    skipped: list[str] = []
    if "real" in plan.kinds:
        if cache_dir is not None:
            found = stored(cache_dir)
            missing = sorted(set(plan.sizes) - {case.n for case in found})
            skipped = [f"real, n {n}: {cache_dir} has no file of that size" for n in missing]
        if checkpoint is not None:
            made, unable = model_cases(checkpoint, prompt_file, plan.sizes)
            found, skipped = found + made, skipped + unable
    cases = [case for case in found if case.n in plan.sizes and (case.d, case.g) in plan.shapes]
    skipped += [
        f"real, n {case.n}, d {case.d}, g {case.g} ({case.source}): not asked for"
        for case in found
        if case not in cases
    ]
    cases += [
        synthetic(kind, n, d, g) for d, g in plan.shapes for n in plan.sizes for kind in SIGMA if kind in plan.kinds
    ]
    return cases, skipped
