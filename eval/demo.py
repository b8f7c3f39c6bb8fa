"""`certjax demo`: a real document, a real model, certified decoding, and a table of what was certified."""

import dataclasses
import pydoc_data.topics
import sys
import time
from pathlib import Path

import jax
import numpy as np

import certjax
from certjax.eval import demo_table, loading
from certjax.eval.progress import Progress
from certjax.eval.replay import audited_attention
from certjax.models.llama import GenerateResult, Llama, LlamaConfig, Snapshot, decode, load_model
from certjax.models.llama.snapshot import snapshot_name

CONTEXT = 8192  # positions where none are asked for
ROUNDS = 3  # generations with each attention, in turn: what else runs on the machine slows both alike
DTYPE = "bfloat16"  # of the caches


def run(
    checkpoint: str,
    *,
    prompt_file: str | None = None,
    context: int | None = None,
    new_tokens: int = 48,
    epsilon: float = 0.1,
    delta_total: float = 0.01,
    replay_steps: int = 16,
    seed: int = 0,
    prefill_dir: str | None = None,
) -> dict[str, float]:
    """Reads a document, generates with certified and dense attention in turn, then replays; prints text and table.

    Args:
      checkpoint: folder made by `certjax.models.convert`, with a tokenizer.
      prompt_file: UTF-8 text; None for the language reference that every CPython carries.
      context: positions in all, of the document's first tokens and what is generated; beyond those that the model was
        trained for, see `stretched`. None for 8192, or fewer where model or text have fewer.
      new_tokens: tokens to generate, at least 3.
      epsilon: allowed error relative to M (value measure).
      delta_total: probability that any certified head output of the generation is off.
      replay_steps: steps whose certified outputs are compared with dense attention on the same inputs.
      seed: of the perturbations, 0 … 2³² − 1.
      prefill_dir: folder that keeps what reading a document gave, a snapshot each (about the bytes of the caches), and
        is looked into before reading one; None for neither.

    Returns:
      The numbers of the table.

    Raises:
      ValueError: a file that is missing, blank or not UTF-8; no tokenizer; a text too short for the context; a context
        that the model cannot have; a folder that cannot be made; a number out of its range.

    Memory: weights and two copies of the caches.
    """
    if new_tokens < 3 or replay_steps < 1:
        raise ValueError(f"tokens must be ≥ 3 and replay ≥ 1: got {new_tokens} and {replay_steps}")
    for name, x in (("epsilon", epsilon), ("delta", delta_total)):
        if not 0 < x < 1:
            raise ValueError(f"{name} must lie in (0, 1): got {x}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in 0 … {2**32 - 1}: got {seed}")
    text, source = read_text(prompt_file)
    if not text.strip():
        raise ValueError(f"{source}: holds no text")
    loaded, tokenizer = loading.load(checkpoint)
    config = LlamaConfig.from_hf(loaded.config)
    trained = config.max_positions
    ids = tokenizer.encode(text)
    total = len(ids)
    if context is None:
        context = min(CONTEXT, trained, total + new_tokens)
    if context <= new_tokens:
        raise ValueError(f"context must exceed the {new_tokens} tokens to generate: got {context}")
    if total + new_tokens < context:
        raise ValueError(
            f"{source} has {total} tokens: a context of {context} with {new_tokens} generated needs "
            f"{context - new_tokens}; give a longer text or use --context {total + new_tokens}"
        )
    ids = ids[: context - new_tokens]
    config = stretched(config, context)
    model = load_model(loaded.params, config)
    del loaded
    heads, layers = config.num_heads, config.num_layers
    delta = certjax.delta_per_call(delta_total, heads=heads, layers=layers, steps=new_tokens)
    promise = certjax.Config(epsilon=epsilon, delta=delta)
    print(
        f"{source}: {len(ids)} of {total} tokens; {layers} layers × {heads} query heads, ε = {epsilon}, "
        f"δ = {delta_total} in all"
    )

    start, kept = prefilled(model, ids, context, prefill_dir)
    rng = jax.random.key(seed)
    bold, plain = ("\033[1m", "\033[0m") if sys.stdout.isatty() else (" ⟶", "")
    print(f"… {tokenizer.decode(ids[-24:])}{bold}", end="", flush=True)
    certified, times = _generate(model, start, promise, new_tokens, rng, tokenizer)
    print(plain, flush=True)
    print("the same with dense attention, and both again in turn …", file=sys.stderr, flush=True)
    other = model.with_attention("dense")
    dense, dense_times = _generate(other, start, promise, new_tokens, rng)
    for _ in range(ROUNDS - 1):
        times = np.concatenate([times, _generate(model, start, promise, new_tokens, rng)[1]])
        dense_times = np.concatenate([dense_times, _generate(other, start, promise, new_tokens, rng)[1]])
    (seconds, cpu), (dense_seconds, dense_cpu) = np.median(times, 0), np.median(dense_times, 0)
    print(f"replaying {replay_steps} steps against dense attention …", file=sys.stderr, flush=True)
    # At least as many tokens as statistics: entry t belongs to the step fed with token t.
    audited = model.with_attention(audited_attention)
    replayed, _ = _generate(audited, start, promise, min(replay_steps, new_tokens - 1) + 1, rng)
    numbers = demo_table.summary(certified, dense, replayed, delta) | {
        "context": len(ids),
        "trained": trained,
        "stretch": context / trained,
        "prefill_tokens_per_s": len(ids) / start.seconds,
        "prefill_kept": kept,
        "certified_tokens_per_s": float(1 / seconds),
        "dense_tokens_per_s": float(1 / dense_seconds),
        "certified_cpu_ms": 1e3 * float(cpu),
        "dense_cpu_ms": 1e3 * float(dense_cpu),
        "timed_steps": len(times),
    }
    demo_table.show(numbers, epsilon, delta_total)
    return numbers


def read_text(prompt_file: str | None) -> tuple[str, str]:
    """(text, what to call it) of a UTF-8 file, or of the language reference that every CPython carries.

    Raises:
      ValueError: the file cannot be read or is not UTF-8.
    """
    if prompt_file is None:
        return "\n\n".join(pydoc_data.topics.topics.values()), "the Python language reference (pydoc_data.topics)"
    try:
        return Path(prompt_file).read_text(encoding="utf-8"), prompt_file
    except OSError as error:
        raise ValueError(f"{prompt_file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{prompt_file}: is not UTF-8 text: {error}") from error


def stretched(config: LlamaConfig, positions: int) -> LlamaConfig:
    """The model for a context of `positions` tokens; the weights stay the same.

    Beyond the positions that it was trained for, YaRN scales them by just what is missing, with its usual constants.
    Embeddings that depend on the length of a context are told it.

    Raises:
      ValueError: the model's positions are scaled already, and not for so many.

    Source: YaRN (arXiv 2309.00071).
    """
    if config.rope.context is not None:
        return config.with_context(positions)
    if positions <= config.max_positions:
        return config
    if config.rope.rope_type != "default":
        raise ValueError(
            f"context of {positions} tokens exceeds the model's {config.max_positions}, and its rotary embedding is "
            f"scaled already ({config.rope.rope_type}); use --context {config.max_positions}"
        )
    rope = dataclasses.replace(
        config.rope,
        rope_type="yarn",
        factor=positions / config.max_positions,
        original_max_positions=config.max_positions,
    )
    return dataclasses.replace(config, max_positions=positions, rope=rope)


def prefilled(model: Llama, ids: list[int], capacity: int, prefill_dir: str | None) -> tuple[Snapshot, bool]:
    """Reads a document, or takes what the folder keeps of reading it.

    Returns:
      The snapshot; whether it is from the folder.
    """
    path = None
    if prefill_dir is not None:
        path = Path(prefill_dir) / snapshot_name(model, [ids], capacity, DTYPE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"{prefill_dir}: cannot be made: {error.strerror}; give another folder") from error
        if path.exists():
            return Snapshot.load(path, model, [ids]), True
    with Progress("prefill", "tokens") as progress:
        snapshot = Snapshot.take(model, [ids], capacity=capacity, cache_dtype=DTYPE, progress=progress)
    if path is not None:
        try:
            snapshot.save(path)
        except ValueError as error:  # the reading itself is not lost by that
            print(f"not kept: {error}", file=sys.stderr)
    return snapshot, False


def _generate(
    model: Llama, start: Snapshot, promise: "certjax.Config", count: int, rng: jax.Array, tokenizer=None
) -> tuple[GenerateResult, np.ndarray]:
    """Decodes from a copy of the caches.

    Returns:
      The result; seconds and CPU seconds [steps, 2] of every step but the first, which compiles.
    """
    times: list[tuple[float, float]] = []
    text = None if tokenizer is None else tokenizer.stream()

    def stream(_, tokens):
        times.append((time.monotonic(), time.process_time()))
        if text is not None:
            print(text.push(int(tokens[0])), end="", flush=True)

    result, _ = decode(
        model,
        *start.resume(model),
        max_new_tokens=count,
        rng=rng,
        certified_config=promise,
        stream=stream,
    )
    if text is not None:
        print(text.flush(), end="", flush=True)
    return result, np.diff(times, axis=0)[1:]
