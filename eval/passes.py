"""`certjax retrieval`: retrieval strategies and oracles beside certified and dense attention, in a model.

Examples are RULER samples, setup B: the context is read with exact attention, the question and the answer prefix are
fed token by token through the attention under test, and so is what it answers. Every strategy and oracle is run three
times on each example, so that measuring disturbs nothing that is measured:

* accuracy: question, prefix and dense attention's own greedy answer are fed (teacher-forced). Attention error: each
  output against dense attention for the same query and cache, √(Σ ‖ô − o‖² / Σ ‖o‖²) over steps, layers and heads.
  Context error: the same against the outputs of the dense run, so with what earlier layers and steps did wrong. Logit
  error: the same of the logits, over steps. Recall: the share of the keys of an exact search for the same queries (by
  perturbed scores for SoftmaxLift and the buckets; of its top half for TopK + Sampling) that were found. Keys: asked of
  oracles or read directly by a strategy, or whose value certified attention read, mean a query head; the exact tokens
  come on top. They are the same for all at the start; those fed later are all exact for strategies, while certified
  attention's window moves on.
* latency: seconds of the parts. Build: indexes of all layers and kv heads (certified attention's codes are made while
  the context is read: not counted). Search: within the oracles. Movement: what asking them takes beyond that, queries
  and answers passing between JAX and the host. Attention: gathering keys and values and the softmax over them and the
  exact tokens. The last three are for one step, all layers, called one by one: JAX's own calls are part of them.
* clean: greedy decoding, nothing measured but the clock. First-token latency: from the context in the caches, indexes
  built, to the first answer token: question and prefix are fed one by one. Later-token latency: median seconds between
  answer tokens. Response time: build, first token and all later ones. Score: RULER's, of an answer cut to the plan's
  `new_tokens`. Layers are called one by one from Python, for every kind of attention alike.

Certified attention samples wherever a level certifies (`always_sample`): at the plan's ε, and at the ε found by
bisection on the example's last queries for the keys (k) or the bytes of SoftmaxLift with Flat.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import certjax
from certjax import retrieval
from certjax.eval import doctor, inputs, passes_curve, retrieval_attention, stepwise, texts
from certjax.eval.bench_report import processor
from certjax.eval.runner import Run, model_digest, read_rows
from certjax.eval.tasks import ruler
from certjax.models import Tokenizer
from certjax.models.llama import Llama

PASSES = ("accuracy", "latency", "clean")
_FORMAT = 1

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
    tasks: tuple[str, ...] = ("niah_single_1", "niah_single_2", "qa_1")
    examples: int = 2
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


def run(
    checkpoint: str,
    folder: str,
    plan: Plan,
    *,
    texts_dir: str | None = None,
    prefill_dir: str | None = None,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Runs what of a plan is not in the folder yet.

    Args:
      checkpoint: folder made by `certjax convert`, with a tokenizer.
      folder: of the run.
      plan: what to run.
      texts_dir: as for `texts.read`.
      prefill_dir: as for `demo.prefilled`.
      say: told a line for each result.

    Returns:
      All rows of the folder.

    Raises:
      ValueError: a text, checkpoint or folder that cannot be used, or a length that model, task or text do not have.
      ImportError: an oracle's library is missing.
    """
    loaded, tokenizer = inputs.load(checkpoint)
    chosen = [texts.read(kind, texts_dir) for kind in plan.texts]
    ids = {text.kind: inputs.tokens(text, tokenizer, max(plan.curve_lengths, default=1)) for text in chosen}
    facts = dict(doctor.report()) | processor()
    names = ("certjax", "jax", "python", "CPU", "ISA level chosen", "threads")
    stamp = {"format": _FORMAT, "model": model_digest(checkpoint), "seed": plan.seed}
    stamp |= {name: facts[name] for name in names if name in facts}
    kept = Run(folder, {"plan": dataclasses.asdict(plan), "model": stamp["model"]})
    common = {"stamp": stamp, "k": plan.k, "window": plan.window, "sinks": plan.sinks}

    def add(name: str, row: dict[str, Any]) -> None:
        kept.add({"id": name} | common | row)
        say(name)

    for text in chosen:
        for n in plan.curve_lengths:
            model = inputs.model_for(loaded, n)
            _curve(plan, kept, add, text, model, ids[text.kind][:n], prefill_dir)
    materials = ruler.load_materials()
    for n in plan.lengths:
        model = inputs.model_for(loaded, n)
        for number in range(plan.examples):
            task = plan.tasks[number % len(plan.tasks)]
            index = number // len(plan.tasks)
            drawn = ruler.generate(
                task, length=n, count=index + 1, tokenizer=tokenizer, materials=materials, seed=plan.seed
            )
            sample = list(drawn)[index]
            pairs = [pair for pair in plan.pairs if number < plan.oracle_examples or pair[1] == plan.pairs[0][1]]
            _Example(plan, kept, add, model, tokenizer, sample, prefill_dir).run(pairs)
    return read_rows(folder)


def _curve(plan, kept, add, text, model, ids, prefill_dir) -> None:
    n = len(ids)
    about = {
        "part": "curve", "text": text.kind, "source": text.source, "text_sha256": text.sha256, "n": n,
        "layers": plan.layers,
    }  # fmt: skip
    wanted = [(name, k) for name in (*CURVE, "certified") for k in plan.ks]
    wanted += [("certified bytes", plan.k), *(("certified", epsilon) for epsilon in plan.epsilons)]
    missing = [(name, k) for name, k in wanted if f"curve/{text.kind}/{n}/{name}/{k}" not in kept.done]
    if not missing:
        return
    recorded = inputs.record(model, ids, prefill_dir=prefill_dir)
    queries = passes_curve.queries_of(recorded, plan.layers)
    certified = _certified_on(plan, queries)
    for name, k in missing:
        if name in CURVE:
            row = passes_curve.strategy_error(queries, plan.strategy(name, k), seed=plan.seed) | {"keys": k}
        elif k in plan.epsilons:
            row = certified.row(k)
        elif name == "certified":
            row = certified.within("keys", k) or {"attention_error": None}
        else:
            row = certified.within("bytes", _flat_bytes(plan, recorded)) or {"attention_error": None}
        at = None if k in plan.epsilons else k
        add(f"curve/{text.kind}/{n}/{name}/{k}", about | {"method": name, "at": at} | row)


def _certified_on(plan: Plan, queries: passes_curve.Queries) -> passes_curve.Certified:
    return passes_curve.Certified(queries, window=plan.window, sinks=plan.sinks, delta=plan.delta, seed=plan.seed)


def _flat_bytes(plan: Plan, recorded: inputs.Recorded) -> float:
    cache, N = recorded.caches[0], recorded.queries.shape[2]
    return passes_curve.flat_bytes(
        len(recorded.ids), plan.k, head_dim=cache.shape[3], group=N // cache.shape[1],
        item=cache.key.dtype.itemsize, window=plan.window, sinks=plan.sinks,
    )  # fmt: skip


class _Example:
    """A sample and what is made of it when it is asked for first."""

    def __init__(
        self,
        plan: Plan,
        kept: Run,
        add: Callable[[str, dict[str, Any]], None],
        model: Llama,
        tokenizer: Tokenizer,
        sample: ruler.Sample,
        prefill_dir: str | None,
    ):
        self.plan, self.kept, self.add, self.model = plan, kept, add, model
        self.tokenizer, self.sample, self.prefill_dir = tokenizer, sample, prefill_dir
        self.limit = min(plan.new_tokens, sample.budget)

    def run(self, pairs: Sequence[tuple[str, str]]) -> None:
        """Dense, certified, and the pairs, as far as they are missing."""
        plan = self.plan
        arms = ["dense", *(f"certified {e:g}" for e in plan.epsilons), "certified keys", "certified bytes"]
        arms += [f"{strategy}/{oracle}" for strategy, oracle in pairs]
        todo = [(arm, [p for p in PASSES if self.name(arm, p) not in self.kept.done]) for arm in arms]
        if not any(missing for _, missing in todo):
            return
        context, self.rest = ruler.encode(
            self.tokenizer, self.sample.context, self.sample.question, self.sample.answer_prefix
        )
        spare = -(-(self.sample.length + 1) // 64) * 64 - len(context)
        self.recorded = inputs.record(self.model, context, spare=spare, prefill_dir=self.prefill_dir)
        queries = passes_curve.queries_of(self.recorded, plan.layers)
        self.certified = _certified_on(plan, queries)
        stepper = self.stepper(stepwise.dense)
        ends = set(self.tokenizer.eos_ids)
        answer, _ = stepper.answer(
            self.rest, self.recorded.caches, self.hints(), limit=self.limit, ends=ends, clock=time.perf_counter
        )
        self.forced = [*self.rest, *answer[:-1]]
        self.logits, self.facts = self.stepper(stepwise.dense, measure=True).feed(
            self.forced, self.recorded.caches, self.hints()
        )
        for arm, missing in todo:
            if missing:
                self.arm(arm, missing, ends)

    def name(self, arm: str, part: str) -> str:
        return f"{self.sample.id}/{arm}/{part}"

    def hints(self) -> tuple:
        return self.model.init_hints(1)

    def stepper(self, attention, *, measure: bool = False, epsilon: float | None = None) -> stepwise.Stepper:
        plan = self.plan
        config = certjax.Config(
            epsilon=np.float32(0.1 if epsilon is None else epsilon), delta=np.float32(plan.delta), window=plan.window,
            sinks=plan.sinks, always_sample=True,
        )  # fmt: skip
        return stepwise.Stepper(self.model, attention, config=config, seed=plan.seed, measure=measure)

    def arm(self, arm: str, missing: list[str], ends: set[int]) -> None:
        """The missing passes of one kind of attention."""
        sample, plan = self.sample, self.plan
        row: dict[str, Any] = {"arm": arm, "n": sample.length, "sample": sample.id, "task": sample.task}
        row |= {"epsilon": None, "strategy": None, "oracle": None, "context_tokens": len(self.recorded.ids)}
        attention: Any
        if arm == "dense":
            attention = stepwise.dense
        elif arm.startswith("certified"):
            attention = stepwise.certified
            row["epsilon"] = self.epsilon(arm.split()[1])
            if row["epsilon"] is None:  # no ε reads so little
                for part in missing:
                    self.add(self.name(arm, part), row | {"part": part, "attainable": False})
                return
        else:
            row["strategy"], row["oracle"] = arm.split("/")
            strategy = plan.strategy(row["strategy"])
            attention = retrieval_attention.RetrievalAttention(strategy)
        hints, seconds = self.hints(), None
        if row["strategy"]:
            hints, seconds = retrieval_attention.build(strategy, ORACLES[row["oracle"]], self.recorded, seed=plan.seed)
        caches = self.recorded.caches
        try:
            for part in missing:
                if part == "accuracy":
                    stepper = self.stepper(attention, measure=True, epsilon=row["epsilon"])
                    found = self.accuracy(*stepper.feed(self.forced, caches, hints))
                elif part == "latency":
                    parts = (
                        retrieval_attention.component_seconds(strategy, self.recorded, hints)
                        if row["strategy"]
                        else {"attention": self.attention_seconds(attention, row["epsilon"])}
                    )
                    found = {"build": seconds} | {f"{name}_seconds": x for name, x in parts.items()}
                else:
                    found = self.clean(self.stepper(attention, epsilon=row["epsilon"]), hints, ends, seconds or 0.0)
                self.add(self.name(arm, part), row | {"part": part} | found)
        finally:
            if row["strategy"]:
                retrieval_attention.release(hints)

    def epsilon(self, what: str) -> float | None:
        if what not in ("keys", "bytes"):
            return float(what)
        limit = self.plan.k if what == "keys" else _flat_bytes(self.plan, self.recorded)
        found = self.certified.within(what, limit)  # type: ignore[arg-type]
        return None if found is None else found["epsilon"]

    def accuracy(self, logits: np.ndarray, facts: dict[str, np.ndarray]) -> dict[str, Any]:
        """Errors against dense attention, and what was read."""
        difference = logits.astype(np.float64) - self.logits
        wanted = facts["wanted"].sum() if "wanted" in facts else 0
        context = self.facts["context"]
        read = facts["bytes"].mean()
        return {
            "steps": len(logits),
            "attention_error": passes_curve.relative(facts["error"], facts["size"]),
            "context_error": passes_curve.relative((facts["context"] - context) ** 2, context**2),
            "logit_error": passes_curve.relative(difference**2, self.logits.astype(np.float64) ** 2),
            "recall": float(facts["hits"].sum() / wanted) if wanted else None,
            "failed": float(facts["failed"].mean()) if "failed" in facts else None,
            "keys": float(facts["candidates" if "wanted" in facts else "keys"].mean()),
            "bytes": float(read) if np.isfinite(read) else None,
        }

    def attention_seconds(self, attention, epsilon: float | None, rounds: int = 3) -> float:
        """Of one step, all layers; medians over the rounds."""
        config, total = self.stepper(attention, epsilon=epsilon).config, 0.0
        hint, rng = certjax.init_hint(batch=1, heads=self.recorded.queries.shape[2]), jax.random.key(self.plan.seed)
        for layer, cache in enumerate(self.recorded.caches):
            query = jax.numpy.asarray(self.recorded.queries[layer, -1][None, None])
            seconds = []
            for _ in range(rounds + 1):
                start = time.perf_counter()
                jax.block_until_ready(_attend(attention, query, cache, rng, hint, config))
                seconds.append(time.perf_counter() - start)
            total += float(np.median(seconds[1:]))
        return total

    def clean(self, stepper: stepwise.Stepper, hints: tuple, ends: set[int], build: float) -> dict[str, Any]:
        """Answer, score and latencies."""
        caches, clock = self.recorded.caches, time.perf_counter
        stepper.answer(self.rest[:1], caches, hints, limit=2, ends=set(), clock=clock)  # compiles
        tokens, times = stepper.answer(self.rest, caches, hints, limit=self.limit, ends=ends, clock=clock)
        text = self.tokenizer.decode(tokens)
        later = np.diff(times[1:])
        return {
            "prediction": text,
            "references": list(self.sample.references),
            "score": ruler.score(self.sample.metric, text, self.sample.references),
            "new_tokens": len(tokens),
            "first_token_seconds": times[1] - times[0],
            "later_token_seconds": float(np.median(later)) if len(later) else None,
            "response_seconds": build + times[-1] - times[0],
        }


@functools.partial(jax.jit, static_argnums=0)
def _attend(attention, query, cache, rng, hint, config):
    return attention(query, cache, rng=rng, hint=hint, config=config).output
