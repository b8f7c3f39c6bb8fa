"""`certjax retrieval`: retrieval strategies and oracles beside certified and dense attention, in a model.

Examples are RULER samples, setup B: the context is read with exact attention, the question and the answer prefix are
fed token by token through the attention under test, and so is what it answers. Every strategy and oracle is run three
times on each example, so that measuring disturbs nothing that is measured:

* accuracy: question, prefix and dense attention's own greedy answer are fed (teacher-forced). Attention error: each
  output against dense attention for the same query and cache, √(Σ ‖ô − o‖² / Σ ‖o‖²) over steps, layers and heads.
  Context error: the same against the outputs of the dense run, so with what earlier layers and steps did wrong. Logit
  error: the same of the logits, over steps. Recall: the share of the keys of an exact search for the same queries (by
  perturbed scores for SoftmaxLift and the buckets; of its top half for TopK + Sampling) that were found. Failed: the
  share of calls in which a strategy knows that it did not get all that it wanted: a limit on its keys was reached, or
  an oracle returned fewer. Where errors of several examples are averaged, their range stands beside. Keys: asked of
  oracles or read directly by a strategy, or whose value certified attention read, mean a query head; the exact tokens
  come on top, and the keys that certified attention or Flat only score. KiB: of cache, metadata and index, exact
  tokens included, where that is known. The exact tokens are the same for all at the start; those fed later are all
  exact for strategies, while certified attention's window moves on.
* latency: seconds of the parts. Build: indexes of all layers and kv heads (certified attention's codes are made while
  the context is read: not counted). Search: within the oracles. Movement: what asking them takes beyond that, queries
  and answers passing between JAX and the host. Attention: gathering keys and values and the softmax over them and the
  exact tokens. The last three are for one step, all layers, called one by one: JAX's own calls are part of them.
* clean: greedy decoding, nothing measured but the clock. First-token latency: from the context in the caches, indexes
  built, to the first answer token: question and prefix are fed one by one. Later-token latency: median seconds between
  answer tokens. Response time: build, first token and all later ones. Score: RULER's, of an answer cut to the plan's
  `new_tokens`. Layers are called one by one from Python, for every kind of attention alike.

Certified attention samples wherever a level certifies (`always_sample`): at the plan's ε, and at the ε found by
bisection, on some of the dense run's own queries, for the keys (k) or the bytes of SoftmaxLift with Flat.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from certjax.eval import inputs, loading, passes_curve, texts
from certjax.eval.passes_example import Example, certified_on, flat_bytes
from certjax.eval.passes_plan import CURVE, ORACLES, Plan
from certjax.eval.run_folder import Run, read_rows
from certjax.eval.runner import PRESETS, make_stamp
from certjax.eval.tasks import ruler

_FORMAT = 1
_SPARE = PRESETS["small"].spare  # the same model and caches as those of `certjax eval`: a text is read once


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
    few = np.eye(4, dtype=np.float32)
    for oracle in {name for _, name in plan.pairs}:
        ORACLES[oracle].build(few, few)  # a missing library is told now
    loaded, tokenizer = loading.load(checkpoint)
    chosen = [texts.read(kind, texts_dir) for kind in plan.texts]
    ids = {text.kind: inputs.tokens(text, tokenizer, max(plan.curve_lengths, default=1)) for text in chosen}
    stamp = make_stamp(checkpoint, plan.seed) | {"format": _FORMAT}
    kept = Run(folder, {"plan": dataclasses.asdict(plan), "model": stamp["model"]})
    common = {"stamp": stamp, "k": plan.k, "window": plan.window, "sinks": plan.sinks}

    def add(name: str, row: dict[str, Any]) -> None:
        kept.add({"id": name} | common | row)
        say(name)

    for text in chosen:
        for n in plan.curve_lengths:
            model = inputs.model_for(loaded, n + _SPARE)
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
            Example(plan, kept, add, model, tokenizer, sample, prefill_dir).run(pairs)
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
    recorded = inputs.record(model, ids, spare=_SPARE, prefill_dir=prefill_dir)
    queries = passes_curve.queries_of(recorded, plan.layers)
    certified = certified_on(plan, queries)
    for name, k in missing:
        if name in CURVE:
            row = passes_curve.strategy_error(queries, plan.strategy(name, k), seed=plan.seed) | {"keys": k}
        elif k in plan.epsilons:
            row = certified.row(k)
        elif name == "certified":
            row = certified.within("keys", k) or {"attention_error": None}
        else:
            row = certified.within("bytes", flat_bytes(plan, recorded)) or {"attention_error": None}
        at = None if k in plan.epsilons else k
        add(f"curve/{text.kind}/{n}/{name}/{k}", about | {"method": name, "at": at} | row)
