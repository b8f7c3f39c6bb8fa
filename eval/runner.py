"""Runs the evaluation: settings (a text, a length), parts (error, audit, ppl, agreement), rows in a folder.

A run's folder holds `settings.json` and `rows.jsonl`, one line a result, written as soon as it is there: a run that was
stopped goes on where it stood, and never has a row twice. `certjax report` makes tables and plots of it.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import certjax
from certjax.eval import agreement, audit, divergence, doctor, errors, inputs, loading, rivals, texts
from certjax.eval.bench_report import processor
from certjax.eval.methods import protocol
from certjax.eval.methods.expected_attention import FUTURE
from certjax.eval.methods.registry import METHODS
from certjax.eval.run_folder import Run, read_rows
from certjax.models import Tokenizer
from certjax.models.checkpoints import Checkpoint
from certjax.models.llama import Llama, LlamaConfig

PARTS = ("error", "audit", "ppl", "agreement")
ORACLE_SHARES = (0.05, 0.02)  # of the keys: dense, 5 % and 2 % must come in this order, or something is wrong
_FORMAT = 1
# What rows depend on besides their id. The rest of a plan says which rows there are: more may follow in a later run.
_SETTINGS = ("layers", "audit_steps", "audit_delta", "ppl_tokens", "new_tokens", "seed")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
      parts: of `PARTS`.
      texts: kinds or files.
      lengths: tokens read, multiples of 64.
      epsilons: of the error table.
      layers: layers of the error table, evenly spaced.
      methods: of the error table.
      audit_epsilons: of the audit.
      audit_steps: newest positions audited.
      audit_delta: δ of the audit, per call and query head.
      ppl_lengths: lengths (of those above) whose next tokens are predicted.
      ppl_texts: the first so many texts are predicted and continued.
      ppl_epsilons: ε of the predictions and of the agreement.
      ppl_tokens: how many are predicted.
      ppl_methods: rivals among the predictions.
      new_tokens: generated for the agreement.
      seed: of everything random.
    """

    parts: tuple[str, ...] = PARTS
    texts: tuple[str, ...] = ("reference", "code", "needles", "prose", "drama")
    lengths: tuple[int, ...] = (4096, 8192)
    epsilons: tuple[float, ...] = (0.1, 0.2)
    layers: int = 6
    methods: tuple[str, ...] = tuple(METHODS)
    audit_epsilons: tuple[float, ...] = audit.EPSILONS
    audit_steps: int = 8
    audit_delta: float = 1e-3
    ppl_lengths: tuple[int, ...] = (8192,)
    ppl_texts: int = 1
    ppl_epsilons: tuple[float, ...] = (0.1,)
    ppl_tokens: int = 128
    ppl_methods: tuple[str, ...] = ("streaming_llm", "quest", "vattention_fixed")
    new_tokens: int = 64
    seed: int = 0

    def __post_init__(self):
        """Raises ValueError for what does not exist or is out of range."""
        for name, known in (("parts", PARTS), ("methods", METHODS), ("ppl_methods", METHODS)):
            unknown = [x for x in getattr(self, name) if x not in known]
            if unknown:
                raise ValueError(f"{name} must be among {', '.join(known)}: got {', '.join(unknown)}")
        if not set(self.ppl_lengths) <= set(self.lengths):
            raise ValueError(f"ppl_lengths must be among lengths {self.lengths}: got {self.ppl_lengths}")
        if len(set(self.texts)) < len(self.texts):
            raise ValueError(f"texts must differ: got {', '.join(self.texts)}")
        for n in self.lengths:
            if n % 64 or n < 512:
                raise ValueError(f"lengths must be multiples of 64 of at least 512: got {n}")
        for epsilon in (*self.epsilons, *self.ppl_epsilons, *self.audit_epsilons):
            certjax.Config(epsilon=epsilon, delta=self.audit_delta)
        for name, low in (("layers", 1), ("audit_steps", 1), ("ppl_texts", 0), ("ppl_tokens", 2), ("new_tokens", 1)):
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}: got {getattr(self, name)}")
        if self.audit_steps > inputs.STEPS:
            raise ValueError(f"audit_steps must be at most {inputs.STEPS}: got {self.audit_steps}")

    @property
    def spare(self) -> int:
        """Positions beyond the text that the parts need, a multiple of 64."""
        return -(-(max(self.ppl_tokens, self.new_tokens) + 1) // 64) * 64


PRESETS: dict[str, Plan] = {
    "smoke": Plan(
        texts=("reference",), lengths=(1024,), epsilons=(0.2,), layers=2,
        methods=("dense", "certified", "paper", "oracle_topk", "quest", "uniform"), audit_steps=2,
        ppl_lengths=(1024,), ppl_epsilons=(0.2,), ppl_tokens=32, ppl_methods=("quest",), new_tokens=16,
    ),
    "small": Plan(),
    "full": Plan(
        texts=("reference", "code", "needles", "prose", "drama", "scripture"), lengths=(8192, 16384, 32768),
        epsilons=(0.05, 0.1, 0.2, 0.3), ppl_texts=6, layers=30, ppl_lengths=(8192, 32768), ppl_tokens=1024,
        ppl_methods=tuple(name for name, m in METHODS.items() if m.traceable and m.family != "certified"),
        new_tokens=256,
    ),
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
      ValueError: a text, checkpoint or folder that cannot be used, or a length that the text does not have.
    """
    loaded, tokenizer = loading.load(checkpoint)
    chosen = [texts.read(kind, texts_dir) for kind in plan.texts]
    stamp = make_stamp(checkpoint, plan.seed) | {"format": _FORMAT}
    kinds = [text.kind for text in chosen]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"texts must have different names, which rows go by: got {', '.join(kinds)}; rename a file")
    if any(LlamaConfig.from_hf(loaded.config).windows):
        raise ValueError(f"{checkpoint}: has layers with sliding windows, which the rivals here do not know of")
    settings = {name: getattr(plan, name) for name in _SETTINGS} | {"model": stamp["model"]}
    kept = Run(folder, settings | {f"text {text.kind}": text.sha256 for text in chosen})
    longest = max(plan.lengths) + plan.spare
    for text in chosen:
        inputs.tokens(text, tokenizer, longest)  # fails before anything is measured
    for i, text in enumerate(chosen):
        for n in plan.lengths:
            predicted = i < plan.ppl_texts and n in plan.ppl_lengths
            about = {"text": text.kind, "source": text.source, "text_sha256": text.sha256, "n": n}
            _setting(
                _Setting(predicted, kept, plan, loaded, tokenizer, text, n, about | {"stamp": stamp}, prefill_dir, say)
            )
    return read_rows(folder)


def make_stamp(checkpoint: str, seed: int) -> dict[str, Any]:
    """What every row says of model, seed, versions and machine."""
    facts = dict(doctor.report()) | processor()
    names = ("certjax", "jax", "python", "CPU", "ISA level chosen", "threads")
    return {"model": model_digest(checkpoint), "seed": seed} | {x: facts[x] for x in names if x in facts}


def model_digest(checkpoint: str) -> str:
    """Of the manifest, which holds the checksums of the parameters."""
    return hashlib.sha256((Path(checkpoint) / "manifest.json").read_bytes()).hexdigest()[:16]


@dataclasses.dataclass
class _Setting:
    """A text and a length; what it needs is made when it is asked for first."""

    predicted: bool
    kept: Run
    plan: Plan
    loaded: Checkpoint
    tokenizer: Tokenizer
    text: texts.Text
    n: int
    about: dict[str, Any]
    prefill_dir: str | None
    say: Callable[[str], None]
    _made: dict[str, Any] = dataclasses.field(default_factory=dict)

    def get(self, name: str, make: Callable[[], Any]) -> Any:
        """Makes it once."""
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    @property
    def ids(self) -> list[int]:
        """The tokens that are read, and those that follow."""
        return self.get("ids", lambda: inputs.tokens(self.text, self.tokenizer, self.n + self.plan.spare))

    @property
    def model(self) -> Llama:
        """Its positions reach to what is generated."""
        return self.get("model", lambda: inputs.model_for(self.loaded, self.n + self.plan.spare))

    @property
    def recorded(self) -> inputs.Recorded:
        """What the model holds after n tokens."""
        return self.get(
            "recorded",
            lambda: inputs.record(self.model, self.ids[: self.n], spare=self.plan.spare, prefill_dir=self.prefill_dir),
        )

    @property
    def rotary(self):
        """Cos and sin of positions 0 … n, and of those after them that methods look ahead to."""
        tables = self.get("rotary", lambda: self.model.rotary(np.arange(self.n + FUTURE + 1)[None]))
        return tuple(x[0].reshape(self.n + FUTURE + 1, -1) for x in tables)

    @property
    def problems(self) -> errors.Problems:
        """Of the error table."""
        last = len(self.recorded.caches) - 1
        layers = sorted({round(float(x)) for x in np.linspace(0, last, min(self.plan.layers, last + 1))})
        return self.get("problems", lambda: errors.problems_of(self.recorded, layers, self.rotary))

    def measured(self, name: str) -> errors.Measured:
        """A method on the problems."""
        return self.get(f"method {name}", lambda: errors.Measured(METHODS[name], self.problems, self.plan.seed))

    def limits(self, epsilon: float) -> dict[errors.Match, float]:
        """Mean keys (times 1.1) and bytes a query head that certified attention reads."""
        ours = self.get(f"ours {epsilon}", lambda: errors.row(self.measured("certified"), epsilon))
        return {"keys": errors.KEYS_RATIO * ours["keys"], "bytes": ours["bytes"]}

    def missing(self, part: str, *keys: Any) -> Iterator[Callable[[dict[str, Any]], None]]:
        """Yields, unless it is there already, a function that adds the row with these keys."""
        name = "/".join(map(str, (part, self.text.kind, self.n, *keys)))
        if name in self.kept.done:
            return
        yield lambda row: self.kept.add({"id": name, "part": part, "protocol": f"{part} {_FORMAT}"} | self.about | row)
        self.say(name)


def _setting(s: _Setting) -> None:
    parts = {"error": _errors, "audit": _audits, "ppl": _predictions, "agreement": _agreement}
    for part in PARTS:
        if part in s.plan.parts:
            parts[part](s)


def _errors(s: _Setting) -> None:
    for name in s.plan.methods:
        method = METHODS[name]
        for epsilon in s.plan.epsilons:
            for match in ("keys", "bytes"):
                if match == "bytes" and (name == "dense" or method.family == "certified"):
                    continue  # nothing is matched
                for add in s.missing("error", name, epsilon, match):
                    measured = s.measured(name)
                    if name == "dense":
                        budget = float(s.n)
                    elif method.family == "certified":
                        budget = epsilon
                    else:
                        budget = measured.budget_for(match, s.limits(epsilon)[match])
                    found = {"method": name, "title": method.title, "family": method.family, "budget": None}
                    if budget is not None:
                        found = errors.row(measured, budget)
                    add({"epsilon": epsilon, "match": match} | found)
        if name != "certified":
            s._made.pop(f"method {name}", None)  # its index


def _audits(s: _Setting) -> None:
    for measure in audit.MEASURES:
        ids = [f"audit/{s.text.kind}/{s.n}/{measure}/{epsilon}" for epsilon in s.plan.audit_epsilons]
        if all(name in s.kept.done for name in ids):
            continue
        rows = audit.audit(
            s.recorded, measure, epsilons=s.plan.audit_epsilons, delta=s.plan.audit_delta, steps=s.plan.audit_steps,
            seed=s.plan.seed, stream=zlib.crc32(f"{s.text.kind} {s.n}".encode()),
        )  # fmt: skip
        for row in rows:
            for add in s.missing("audit", measure, row["epsilon"]):
                add(row)


def _predictions(s: _Setting) -> None:
    if not s.predicted:
        return
    tail = s.ids[s.n : s.n + s.plan.ppl_tokens + 1]
    config, later = s.model.config, (len(tail) - 1) / 2  # tokens after the first n that a step holds, on average
    delta = certjax.delta_per_call(0.01, heads=config.num_heads, layers=config.num_layers, steps=len(tail))

    def feed(attention, hints=None, **options):
        promise = certjax.Config(delta=delta, **options)
        return divergence.predictions(
            s.model, attention, s.recorded.caches, hints, tail, config=promise, seed=s.plan.seed
        )

    dense = lambda: s.get("dense predictions", lambda: feed("dense"))
    held = s.n + 1 + np.arange(len(tail) - 1)

    def row(found, pool_only=False):
        log_p, facts = found
        if pool_only:  # certificates leave out what is always read
            facts = facts | {"keys_read": facts["keys_read"] + (held - dense()[1]["keys_read"])}
        return divergence.row(log_p, facts, dense()[0], tail[1:])

    for add in s.missing("ppl", "dense"):
        add({"method": "dense"} | row(dense(), pool_only=True))
    for epsilon in s.plan.ppl_epsilons:
        always = lambda epsilon=epsilon: s.get(
            f"predictions {epsilon}",
            lambda: row(feed("certified", epsilon=epsilon, always_sample=True), pool_only=True),
        )
        for add in s.missing("ppl", "certified, always sampled", epsilon):
            add({"method": "certified, always sampled", "epsilon": epsilon} | always())
        for add in s.missing("ppl", "certified", epsilon):
            add({"method": "certified", "epsilon": epsilon} | row(feed("certified", epsilon=epsilon), pool_only=True))
        for name in s.plan.ppl_methods:
            for add in s.missing("ppl", name, epsilon):
                limit = errors.KEYS_RATIO * always()["keys"] - later
                budget = s.measured(name).budget_for("keys", limit)
                found = {"method": name, "epsilon": epsilon, "budget": budget, "perplexity": None}
                if budget is not None:
                    hints = rivals.make_indexes(METHODS[name], s.recorded, s.rotary, budget, s.plan.seed)
                    found |= row(feed(rivals.RivalAttention(METHODS[name]), hints))
                add(found)
    oracle = METHODS["oracle_topk"]
    for share in ORACLE_SHARES:
        if share * s.n < errors.WINDOW + protocol.SPARE:
            continue  # nothing would be left to choose
        for add in s.missing("ppl", f"oracle {share:.0%}"):
            hints = rivals.make_indexes(oracle, s.recorded, s.rotary, round(share * s.n), s.plan.seed)
            found = feed(rivals.RivalAttention(oracle), hints)
            add({"method": f"oracle_topk, {share:.0%} of the keys"} | row(found))


def _agreement(s: _Setting) -> None:
    if not s.predicted:
        return
    for mode, temperature in agreement.MODES.items():
        for epsilon in s.plan.ppl_epsilons:
            for add in s.missing("agreement", mode, epsilon):
                row = agreement.compare(
                    s.model, s.recorded, s.ids[s.n], epsilon=epsilon, temperature=temperature,
                    new_tokens=s.plan.new_tokens, seed=s.plan.seed,
                )  # fmt: skip
                add({"mode": mode, "epsilon": epsilon} | row)
