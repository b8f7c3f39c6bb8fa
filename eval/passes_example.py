"""One example of `certjax retrieval`: every kind of attention, three passes each (defined in passes.py)."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import certjax
from certjax.eval import inputs, passes_curve, retrieval_attention, stepwise
from certjax.eval.passes_plan import ORACLES, Plan
from certjax.eval.run_folder import Run
from certjax.eval.tasks import ruler
from certjax.models import Tokenizer
from certjax.models.llama import Llama

PASSES = ("accuracy", "latency", "clean")


def certified_on(plan: Plan, queries: passes_curve.Queries) -> passes_curve.Certified:
    """Certified attention with the plan's promise."""
    return passes_curve.Certified(queries, window=plan.window, sinks=plan.sinks, delta=plan.delta, seed=plan.seed)


def flat_bytes(plan: Plan, recorded: inputs.Recorded) -> float:
    """Bytes that SoftmaxLift with `Flat` reads a query head of these caches."""
    cache, N = recorded.caches[0], recorded.queries.shape[2]
    return passes_curve.flat_bytes(
        len(recorded.ids), plan.k, head_dim=cache.shape[3], group=N // cache.shape[1],
        item=cache.key.dtype.itemsize, window=plan.window, sinks=plan.sinks,
    )  # fmt: skip


class Example:
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
        todo = [(arm, [p for p in PASSES if self._name(arm, p) not in self.kept.done]) for arm in arms]
        if not any(missing for _, missing in todo):
            return
        context, self.rest = ruler.encode(
            self.tokenizer, self.sample.context, self.sample.question, self.sample.answer_prefix
        )
        spare = -(-(self.sample.length + 1) // 64) * 64 - len(context)
        self.recorded = inputs.record(self.model, context, spare=spare, prefill_dir=self.prefill_dir)
        stepper = self._stepper(stepwise.dense)
        ends = set(self.tokenizer.eos_ids)
        answer, _ = stepper.answer(
            self.rest, self.recorded.caches, self._hints(), limit=self.limit, ends=ends, clock=time.perf_counter
        )
        self.forced = [*self.rest, *answer[:-1]]
        self.logits, self.facts, caches = self._stepper(stepwise.dense, measure=True).feed(
            self.forced, self.recorded.caches, self._hints()
        )
        fed = inputs.Recorded(caches, self.facts["query"].swapaxes(0, 1), [*context, *self.forced])
        backs = range(0, len(self.forced), -(-len(self.forced) // inputs.STEPS))
        self.certified = certified_on(plan, passes_curve.queries_of(fed, len(caches), backs))
        for arm, missing in todo:
            if missing:
                self._arm(arm, missing, ends)

    def _name(self, arm: str, part: str) -> str:
        return f"{self.sample.id}/{arm}/{part}"

    def _hints(self) -> tuple:
        return self.model.init_hints(1)

    def _stepper(self, attention, *, measure: bool = False, epsilon: float | None = None) -> stepwise.Stepper:
        plan = self.plan
        config = certjax.Config(
            epsilon=np.float32(0.1 if epsilon is None else epsilon), delta=np.float32(plan.delta), window=plan.window,
            sinks=plan.sinks, always_sample=True,
        )  # fmt: skip
        return stepwise.Stepper(self.model, attention, config=config, seed=plan.seed, measure=measure)

    def _arm(self, arm: str, missing: list[str], ends: set[int]) -> None:
        """The missing passes of one kind of attention."""
        sample, plan = self.sample, self.plan
        row: dict[str, Any] = {"arm": arm, "n": sample.length, "sample": sample.id, "task": sample.task}
        row |= {"epsilon": None, "strategy": None, "oracle": None, "context_tokens": len(self.recorded.ids)}
        attention: Any
        if arm == "dense":
            attention = stepwise.dense
        elif arm.startswith("certified"):
            attention = stepwise.certified
            row["epsilon"] = self._epsilon(arm.split()[1])
            if row["epsilon"] is None:  # no ε reads so little
                for part in missing:
                    self.add(self._name(arm, part), row | {"part": part, "attainable": False})
                return
        else:
            row["strategy"], row["oracle"] = arm.split("/")
            strategy = plan.strategy(row["strategy"])
            attention = retrieval_attention.RetrievalAttention(strategy)
        hints, seconds = self._hints(), None
        if row["strategy"]:
            hints, seconds = retrieval_attention.build(strategy, ORACLES[row["oracle"]], self.recorded, seed=plan.seed)
        caches = self.recorded.caches
        try:
            for part in missing:
                if part == "accuracy":
                    stepper = self._stepper(attention, measure=True, epsilon=row["epsilon"])
                    found = self._accuracy(*stepper.feed(self.forced, caches, hints)[:2])
                    if arm == "softmax_lift/flat":
                        found["bytes"] = flat_bytes(plan, self.recorded)
                elif part == "latency":
                    parts = (
                        retrieval_attention.component_seconds(strategy, self.recorded, hints)
                        if row["strategy"]
                        else {"attention": self._attention_seconds(attention, row["epsilon"])}
                    )
                    found = {"build": seconds} | {f"{name}_seconds": x for name, x in parts.items()}
                else:
                    found = self._clean(self._stepper(attention, epsilon=row["epsilon"]), hints, ends, seconds or 0.0)
                self.add(self._name(arm, part), row | {"part": part} | found)
        finally:
            if row["strategy"]:
                retrieval_attention.release(hints)

    def _epsilon(self, what: str) -> float | None:
        if what not in ("keys", "bytes"):
            return float(what)
        limit = self.plan.k if what == "keys" else flat_bytes(self.plan, self.recorded)
        found = self.certified.within(what, limit)  # type: ignore[arg-type]
        return None if found is None else found["epsilon"]

    def _accuracy(self, logits: np.ndarray, facts: dict[str, np.ndarray]) -> dict[str, Any]:
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

    def _attention_seconds(self, attention, epsilon: float | None, rounds: int = 3) -> float:
        """Of one step, all layers; medians over the rounds."""
        config, total = self._stepper(attention, epsilon=epsilon).config, 0.0
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

    def _clean(self, stepper: stepwise.Stepper, hints: tuple, ends: set[int], build: float) -> dict[str, Any]:
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
