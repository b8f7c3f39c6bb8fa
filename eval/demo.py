"""`certjax demo`: a real document, a real model, certified decoding, and a table of what was certified."""

import pydoc_data.topics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.progress import Progress
from certjax.eval.replay import audited_attention
from certjax.models import Tokenizer, checkpoints
from certjax.models.llama import GenerateResult, LlamaConfig, decode, load_model, prefill


def run(
    checkpoint: str,
    *,
    prompt_file: str | None = None,
    context: int = 8000,
    new_tokens: int = 48,
    epsilon: float = 0.1,
    delta_total: float = 0.01,
    replay_steps: int = 16,
    seed: int = 0,
) -> dict[str, float]:
    """Prefills a document, generates with certified attention, then dense, then replays; prints text and table.

    Args:
      checkpoint: folder made by `certjax.models.convert`, with a tokenizer.
      prompt_file: UTF-8 text; None for the language reference that every CPython carries.
      context: tokens of the text to read at most.
      new_tokens: tokens to generate, at least 3.
      epsilon: allowed error relative to M (value measure).
      delta_total: probability that any certified head output of the generation is off.
      replay_steps: steps whose certified outputs are compared with dense attention on the same inputs.
      seed: of the perturbations, 0 … 2³² − 1.

    Returns:
      The numbers of the table.

    Raises:
      ValueError: a file that is missing, blank or not UTF-8; no tokenizer; too many tokens for the model; a number out
        of its range.
    """
    if new_tokens < 3 or context < 1 or replay_steps < 1:
        raise ValueError(f"tokens must be ≥ 3, context and replay ≥ 1: got {new_tokens}, {context}, {replay_steps}")
    for name, x in (("epsilon", epsilon), ("delta", delta_total)):
        if not 0 < x < 1:
            raise ValueError(f"{name} must lie in (0, 1): got {x}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in 0 … {2**32 - 1}: got {seed}")
    text, source = read_text(prompt_file)
    if not text.strip():
        raise ValueError(f"{source}: holds no text")
    loaded = checkpoints.load(checkpoint)
    if loaded.tokenizer is None:
        raise ValueError(f"{checkpoint}: has no tokenizer; convert a model that carries one")
    tokenizer = Tokenizer(loaded.tokenizer, loaded.tokenizer_config)
    config = LlamaConfig.from_hf(loaded.config)
    model = load_model(loaded.params, config)
    del loaded
    ids = tokenizer.encode(text)
    total = len(ids)
    ids = ids[:context]
    room = config.max_positions - new_tokens
    if len(ids) > room:
        raise ValueError(
            f"context of {len(ids)} tokens and {new_tokens} new ones exceed the model's {config.max_positions}; "
            f"use --context {room}"
        )
    heads, layers = config.num_heads, config.num_layers
    delta = certjax.delta_per_call(delta_total, heads=heads, layers=layers, steps=new_tokens)
    promise = certjax.Config(epsilon=epsilon, delta=delta)
    print(
        f"{source}: {len(ids)} of {total} tokens; {layers} layers × {heads} query heads, ε = {epsilon}, "
        f"δ = {delta_total} in all"
    )

    caches = model.init_caches(1, len(ids) + new_tokens)
    start = time.monotonic()
    with Progress("prefill", "tokens") as progress:
        logits, caches = prefill(model, [ids], caches, progress=progress)
    prefill_seconds = time.monotonic() - start

    rng = jax.random.key(seed)
    print(
        f"… {tokenizer.decode(ids[-24:])}\033[1m" if sys.stdout.isatty() else f"… {tokenizer.decode(ids[-24:])} ⟶",
        end="",
        flush=True,
    )
    certified, certified_rate = _generate(model, logits, caches, promise, new_tokens, rng, tokenizer)
    print("\033[0m" if sys.stdout.isatty() else "", flush=True)
    print("the same with dense attention …", file=sys.stderr, flush=True)
    dense, dense_rate = _generate(model.with_attention("dense"), logits, caches, promise, new_tokens, rng)
    print(f"replaying {replay_steps} steps against dense attention …", file=sys.stderr, flush=True)
    # At least as many tokens as statistics: entry t belongs to the step fed with token t.
    audited = model.with_attention(audited_attention)
    replayed, _ = _generate(audited, logits, caches, promise, min(replay_steps, new_tokens - 1) + 1, rng)
    numbers = _summary(certified, dense, replayed, delta, len(ids), heads, layers)
    numbers |= {
        "prefill_tokens_per_s": len(ids) / prefill_seconds,
        "certified_tokens_per_s": certified_rate,
        "dense_tokens_per_s": dense_rate,
    }
    _print_table(numbers, epsilon, delta_total)
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


def _generate(model, logits, caches, promise, count, rng, tokenizer=None) -> tuple[GenerateResult, float]:
    """Decodes from a copy of the caches; returns the result and tokens/s without the steps that compile."""
    times: list[float] = []
    text = None if tokenizer is None else tokenizer.stream()

    def stream(_, tokens):
        times.append(time.monotonic())
        if text is not None:
            print(text.push(int(tokens[0])), end="", flush=True)

    result, _ = decode(
        model,
        logits,
        jax.tree.map(jnp.copy, caches),
        max_new_tokens=count,
        rng=rng,
        certified_config=promise,
        stream=stream,
    )
    if text is not None:
        print(text.flush(), end="", flush=True)
    steps = np.diff(times)[1:]
    return result, float(1 / np.median(steps)) if len(steps) else float("nan")


def _summary(certified, dense, replayed, delta, context, heads, layers) -> dict[str, float]:
    stats = {name: np.asarray(x) for name, x in certified.statistics.items()}
    sampled = stats["certified"] & ~stats["exact"]
    keys = stats["keys_read"]
    over = np.asarray(replayed.statistics["error_over_epsilon"])
    return {
        "context": context,
        "new_tokens": certified.tokens.shape[1],
        "head_steps": sampled.size,
        "sampled_share": float(sampled.mean()),
        "exact_share": float(stats["exact"].mean()),
        "uncertified": int((~stats["certified"]).sum()),
        "keys_mean": float(keys.mean()),
        "keys_p90": float(np.percentile(keys, 90)),
        "keys_median": float(np.median(keys)),
        "pool": round(float(np.asarray(dense.statistics["keys_read"]).mean())),  # dense reads all of it
        "bytes_share": float(stats["bytes_read"].sum() / np.asarray(dense.statistics["bytes_read"]).sum()),
        "delta_spent": certjax.delta_spent(delta, calls=int(sampled.sum())),
        "same_tokens": int((np.asarray(certified.tokens) == np.asarray(dense.tokens)).cumprod(-1).sum()),
        "replayed_steps": over.shape[0],
        "replayed_head_steps": int((over > 0).sum()),
        "largest_error_over_epsilon": float(over.max()),
        "violations": int((over > 1).sum()),
    }


def _print_table(n: dict[str, float], epsilon: float, delta_total: float) -> None:
    rows = {
        "context": "{context} tokens, then {new_tokens} generated",
        "prefill (exact)": "{prefill_tokens_per_s:.0f} tokens/s",
        "decode, dense": "{dense_tokens_per_s:.2f} tokens/s",
        "decode, certified": "{certified_tokens_per_s:.2f} tokens/s ({implementation} implementation)",
        "head-steps": "{head_steps}: {sampled_share:.1%} sampled and certified, {exact_share:.1%} exact, "
        "{uncertified} without certificate",
        "keys read per head": "mean {keys_mean:.0f}, median {keys_median:.0f}, p90 {keys_p90:.0f} of a pool of {pool}",
        "bytes read": "{bytes_share:.1%} of dense (metadata, keys, values; a model, not a measurement)",
        "δ spent": "{delta_spent:.2g} of {delta_total:.2g} in all",
        "same tokens as dense": "the first {same_tokens} of {new_tokens}",
        "replay against dense": "{replayed_steps} steps, {replayed_head_steps} sampled head-steps: "
        "largest error {largest_error_over_epsilon:.3f} ε, {violations} violations",
    }
    facts = n | {"delta_total": delta_total, "implementation": certjax.choose_implementation()}
    width = max(map(len, rows))
    print(f"\nε = {epsilon} (value measure: ‖ô − o‖ ≤ ε M)")
    for name, text in rows.items():
        print(f"  {name:<{width}}  {text.format(**facts)}")
