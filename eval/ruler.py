"""`certjax ruler`: the thirteen RULER tasks with dense, certified and retrieval attention, on the same samples.

Protocol. The prompt is read with exact attention (setup A), or its context is (setup B); what follows is fed token by
token through the attention under test, greedily, until an end token or the task's budget. Scores are the official
ones. Every attention is compared with dense attention of the same setup, sample by sample; a cell whose dense score is
below a gate is marked: where the model itself fails, nothing can be told apart. Rows go to `rows.jsonl` one by one;
the same command goes on with them.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import certjax
from certjax import retrieval
from certjax.eval import demo, doctor, loading, ruler_arms, ruler_report, stepwise
from certjax.eval.bench_report import processor
from certjax.eval.tasks import ruler
from certjax.eval.tasks.ruler.rows import Rows
from certjax.eval.tasks.ruler.runner import Setup
from certjax.eval.tasks.ruler.templates import digest
from certjax.models import Tokenizer
from certjax.models.llama import Llama, LlamaConfig, load_model

_DTYPE = "bfloat16"  # of the caches


def run(
    checkpoint: str,
    *,
    out: str,
    tasks: Sequence[str] = tuple(ruler.TASKS),
    lengths: Sequence[int] = (4096,),
    samples: int = 10,
    setups: Sequence[Setup] = ("A", "B"),
    attentions: Mapping[str, ruler_arms.Arm] | Sequence[str] = ("dense", "certified"),
    k: int = 128,
    window: int = 1024,
    epsilon: float = 0.1,
    delta_total: float = 0.01,
    seed: int = 42,
    policy: ruler.Policy = "fresh",
    prefix: bool = True,
    chat: str | None = None,
    gate: float = 50.0,
    template_file: str | None = None,
    word_file: str | None = None,
    essay_file: str | None = None,
    squad_file: str | None = None,
    hotpot_file: str | None = None,
) -> dict[str, Any]:
    """Runs what `rows.jsonl` does not have yet, prints a table, and writes `summary.json`; see the module.

    Args:
      checkpoint: folder made by `certjax convert`, with a tokenizer.
      out: folder of the results.
      tasks: names of `ruler.TASKS`.
      lengths: tokens of prompt and answer together.
      samples: of each task and length; a later run may ask for more.
      setups: "A", "B".
      attentions: of `ruler_arms.NAMES`, or a name each for any attention of `Llama` or retrieval strategy; "dense" is
        what others are compared with.
      k: keys that retrieval strategies named so ask for.
      window: newest tokens that are exact for certified attention, and at the start for strategies; so is the first.
      epsilon: of the certified attention, value measure.
      delta_total: of an answer: probability that any of its certified outputs is off.
      seed: of samples and perturbations.
      policy: see `ruler.generate`.
      prefix: see `ruler.generate`.
      chat: see `ruler.generate`.
      gate: dense score in points under which a cell is marked.
      template_file: see `ruler.load_materials`, as for the other files.
      word_file: see above.
      essay_file: see above.
      squad_file: see above.
      hotpot_file: see above.

    Returns:
      What is written to `summary.json`: the settings, a row a cell, means over the tasks.

    Raises:
      ValueError: an argument out of range, a file that cannot be used, a length that the model or a task cannot have,
        or results of other settings in the folder.

    Memory: weights and two copies of the caches.
    """
    for name, x in (("samples", samples), *(("lengths", length) for length in lengths)):
        if x < 1:
            raise ValueError(f"{name} must be positive, got {x}")
    if not isinstance(attentions, Mapping):
        attentions = {name: ruler_arms.arm(name, k, window) for name in attentions}
    materials = ruler.load_materials(
        template_file=template_file, word_file=word_file, essay_file=essay_file, squad_file=squad_file,
        hotpot_file=hotpot_file,
    )  # fmt: skip
    loaded, tokenizer = loading.load(checkpoint)
    config = LlamaConfig.from_hf(loaded.config)
    if max(lengths) > config.max_positions:
        raise ValueError(
            f"length {max(lengths)} exceeds the model's longest context of {config.max_positions}; ask for less"
        )
    model = load_model(loaded.params, demo.stretched(config, max(lengths)))
    for attention in attentions.values():
        # Raises before any prompt is read.
        if isinstance(attention, retrieval.Strategy):
            stepwise.Stepper(model, stepwise.dense, config=certjax.Config())
        else:
            model.with_attention(attention)
    promise = certjax.Config(epsilon=epsilon, delta=delta_total, window=window, sinks=ruler_arms.SINKS)
    settings = {
        "generator": ruler.GENERATOR_VERSION,
        "policy": policy,
        "seed": seed,
        "prefix": prefix,
        "chat": chat,
        "templates": digest([materials.templates, materials.chat]),
        "templates_name": template_file or "own wording 1",
        **{
            name: {"name": source.name, "sha256": source.sha256}
            for name, source in (
                ("words", materials.words),
                ("essay", materials.essay),
                ("qa_1", materials.qa_1),
                ("qa_2", materials.qa_2),
            )
        },
        "model": digest((Path(checkpoint) / "manifest.json").read_bytes()),
        "model_config": digest(loaded.config),
        "tokenizer": digest([loaded.tokenizer, loaded.tokenizer_config]),
        "positions": repr(model.config.rope),
        "cache_dtype": _DTYPE,
        "epsilon": epsilon,
        "delta_total": delta_total,
        "window": window,
        "sinks": ruler_arms.SINKS,
        "environment": _environment(),
    }
    del loaded
    rows = Rows(Path(out) / "rows.jsonl", settings)
    for row in rows.rows:
        name = row["attention"]
        if name in attentions and row["how"] != ruler_arms.describe(attentions[name]):
            raise ValueError(
                f"{out}: {name} was {row['how']}, is {ruler_arms.describe(attentions[name])}: give it another name, or "
                "use another folder"
            )
    for task in tasks:
        for length in lengths:
            drawn = ruler.generate(
                task, length=length, count=samples, tokenizer=tokenizer, materials=materials, seed=seed, policy=policy,
                prefix=prefix, chat=chat,
            )  # fmt: skip
            for sample in drawn:
                missing = [(s, a) for s in setups for a in attentions if f"{sample.id}/{s}/{a}" not in rows]
                if missing:
                    _run_sample(model, tokenizer, sample, missing, attentions, promise, seed, rows)
    summary = {"settings": settings, "gate": gate, **ruler_report.summary(rows.rows, gate)}
    (Path(out) / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    ruler_report.show(summary)
    return summary


def _run_sample(
    model: Llama,
    tokenizer: Tokenizer,
    sample: ruler.Sample,
    missing: Sequence[tuple[Setup, str]],
    attentions: Mapping[str, ruler_arms.Arm],
    promise: "certjax.Config",
    seed: int,
    rows: Rows,
) -> None:
    begin = time.monotonic()
    start = ruler.read(model, tokenizer, sample, cache_dtype=_DTYPE)
    start.logits.block_until_ready()
    prefill_seconds = time.monotonic() - begin
    shape = {"heads": model.config.num_heads, "layers": model.config.num_layers}
    for setup, name in missing:
        delta = certjax.delta_per_call(promise.delta, steps=len(start.rest) + sample.budget, **shape)
        row_id = f"{sample.id}/{setup}/{name}"
        # Python's hash of a string differs from run to run.
        rng = jax.random.fold_in(jax.random.key(seed), np.uint32(int(digest(row_id.encode())[:8], 16)))
        begin, attention = time.monotonic(), attentions[name]
        if isinstance(attention, retrieval.Strategy):
            answer = ruler_arms.answer_by_retrieval(
                model, tokenizer, sample, strategy=attention, setup=setup, rng=rng, start=start
            )
        else:
            answer = ruler.run_sample(
                model, tokenizer, sample, attention=attention, setup=setup, rng=rng, start=start,
                config=dataclasses.replace(promise, delta=delta),
            )  # fmt: skip
        row = {
            "id": row_id,
            **{key: getattr(sample, key) for key in ("task", "length", "index", "metric", "budget", "size", "unit")},
            "gold": list(sample.gold),
            "setup": setup,
            "attention": name,
            "how": ruler_arms.describe(attention),
            "prompt": digest([sample.context, sample.question, sample.answer_prefix]),
            "prompt_tokens": len(start.context) + len(start.rest),
            "context_tokens": len(start.context),
            "references": list(sample.references),
            "prediction": answer.text,
            "score": ruler.score(sample.metric, answer.text, sample.references),
            "null": not ruler.clean(answer.text),
            "new_tokens": len(answer.tokens),
            "ended": answer.ended,
            "steps": answer.steps,
            **answer.statistics,
            "prefill_seconds": round(prefill_seconds, 3),
            "seconds": round(time.monotonic() - begin, 3),
        }
        rows.add(row)
        print(
            f"{row_id}: {row['score']:.2f}  {row['prompt_tokens']} tokens, {row['seconds']:.1f} s",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def _environment() -> dict[str, str]:
    # Not the threads: results do not depend on them, and they are not known before the first call.
    kept = ("python", *doctor.PACKAGES, "ISA level chosen", "certified decode")
    facts = dict(doctor.report())
    return {name: facts[name] for name in kept if name in facts} | {"CPU": processor()["CPU"]}
