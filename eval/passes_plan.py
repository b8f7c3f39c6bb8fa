"""What `certjax retrieval` runs: strategies, oracles, lengths, and how much of each."""

import dataclasses
from collections.abc import Callable

import certjax
from certjax import retrieval
from certjax.eval import inputs
from certjax.eval.tasks import ruler

STRATEGIES: dict[str, tuple[str, Callable[..., retrieval.Strategy]]] = {
    "softmax_lift": ("SoftmaxLift", lambda k, **x: retrieval.SoftmaxLift(budget=k, **x)),
    "top_k": ("TopK", lambda k, **x: retrieval.TopK(budget=k, **x)),
    "top_k_sampling": ("TopK + Sampling", lambda k, **x: retrieval.TopKSampling(budget=k, **x)),
    # The budget counts repeated questions: a quarter of it as sample leaves room for them.
    "adaptive_buckets": (
        "AdaptiveBuckets(2), K + 1 = k / 4",
        lambda k, **x: retrieval.AdaptiveBuckets(samples=max(2, k // 4 - 1), budget=k, **x),
    ),
    "adaptive_buckets_free": (
        "AdaptiveBuckets(2), K + 1 = k, no limit",
        lambda k, **x: retrieval.AdaptiveBuckets(samples=k - 1, **x),
    ),
    "non_adaptive_buckets": (
        "NonAdaptiveBuckets(2), K + 1 = k, no limit",
        lambda k, **x: retrieval.NonAdaptiveBuckets(samples=k - 1, **x),
    ),
}
ORACLES: dict[str, retrieval.Oracle] = {
    "flat": retrieval.Flat(),
    "faiss_flat": retrieval.FaissFlat(),
    "ivf": retrieval.IVF(),
    "hnsw": retrieval.HNSW(),
    "nsg": retrieval.NSG(),
    "mlann": retrieval.MLANN(),
    "pipnn": retrieval.PiPNN(fanout=2),
}
CURVE = ("softmax_lift", "top_k", "top_k_sampling")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
      lengths: tokens of an example, question and answer included.
      tasks: of RULER; examples take them in turn.
      examples: of each length.
      oracle_examples: of these, those on which other oracles than the first are run.
      pairs: (strategy, oracle), names of `STRATEGIES` and `ORACLES`.
      k: keys requested of oracles.
      window: newest tokens of the context that are exact.
      sinks: oldest tokens that are exact.
      epsilons: of certified attention.
      delta: per call and query head.
      new_tokens: of an answer, at most.
      texts: kinds or files, for error against k.
      curve_lengths: tokens read for it, multiples of 64.
      ks: its budgets.
      layers: its layers, evenly spaced.
      seed: of everything random.
    """

    lengths: tuple[int, ...] = (4096,)
    tasks: tuple[str, ...] = ("niah_single_2", "niah_multikey_1", "niah_single_1")
    examples: int = 1
    oracle_examples: int = 1
    pairs: tuple[tuple[str, str], ...] = (
        *((name, "flat") for name in STRATEGIES),
        *(("softmax_lift", name) for name in ORACLES if name != "flat"),
    )
    k: int = 128
    window: int = 1024
    sinks: int = 1
    epsilons: tuple[float, ...] = (0.1, 0.2)
    delta: float = 1e-3
    new_tokens: int = 16
    texts: tuple[str, ...] = ("reference",)
    curve_lengths: tuple[int, ...] = (4096, 8192)
    ks: tuple[int, ...] = (32, 64, 128, 256, 512)
    layers: int = 6
    seed: int = 0

    def __post_init__(self):
        """Raises ValueError for what does not exist or is out of range."""
        for names, known, what in (
            ([s for s, _ in self.pairs], STRATEGIES, "strategies"),
            ([o for _, o in self.pairs], ORACLES, "oracles"),
            (self.tasks, ruler.TASKS, "tasks"),
        ):
            unknown = [name for name in names if name not in known]
            if unknown:
                raise ValueError(f"{what} must be among {', '.join(known)}: got {', '.join(unknown)}")
        for n in self.curve_lengths:
            if n % 64 or n <= inputs.PAST + inputs.STEPS:
                raise ValueError(f"lengths must be multiples of 64 above {inputs.PAST + inputs.STEPS}: got {n}")
        for name, least in (("examples", 0), ("oracle_examples", 0), ("new_tokens", 1), ("layers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}: got {getattr(self, name)}")
        for k in (self.k, *self.ks):
            if k < 4:
                raise ValueError(f"k must be at least 4: got {k}")
        for epsilon in self.epsilons:
            certjax.Config(epsilon=epsilon, delta=self.delta, window=self.window, sinks=self.sinks)

    def strategy(self, name: str, k: int | None = None) -> retrieval.Strategy:
        """A strategy with the plan's window."""
        return STRATEGIES[name][1](self.k if k is None else k, window=self.window, sinks=self.sinks)


PRESETS = {
    "smoke": Plan(
        lengths=(1024,), curve_lengths=(1024,), examples=1, pairs=tuple((name, "flat") for name in CURVE), window=256,
        ks=(32, 128), layers=2, epsilons=(0.2,), new_tokens=8,
    ),
    "small": Plan(),
}  # fmt: skip
