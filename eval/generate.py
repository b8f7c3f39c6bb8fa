"""`certjax generate`: a prompt from a file, a pipe or the command line, or a conversation; text or JSON."""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

import jax

import certjax
from certjax.eval import loading
from certjax.eval.demo import read_text
from certjax.eval.progress import Progress
from certjax.eval.session import Answer, Session, certificate_summary
from certjax.models.llama import LlamaConfig, load_model
from certjax.models.llama.generate import check_options

CHAT_CONTEXT = 8192  # tokens of a conversation where none are asked for


def run(
    checkpoint: str,
    *,
    prompt_file: str | None = None,
    text: str | None = None,
    attention: Literal["certified", "dense"] = "certified",
    epsilon: float = 0.1,
    delta: float = 0.01,
    delta_scope: Literal["call", "generation"] = "generation",
    max_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    context: int | None = None,
    as_json: bool = False,
) -> None:
    """Generates and prints: text as it comes, one line about it on standard error; or JSON, an object for each prompt.

    Args:
      checkpoint: folder made by `certjax convert`, with a tokenizer.
      prompt_file: UTF-8 text to continue, "-" for standard input.
      text: text to continue. Without either a conversation, line by line from standard input to its end, in the model's
        own chat template.
      attention: of decode steps.
      epsilon: allowed error relative to M (value measure).
      delta: probability that something certified is off.
      delta_scope: what it is for: one attention call, or an answer.
      max_tokens: of an answer.
      temperature: 0 for the most likely token each time.
      top_k: see `generate`.
      top_p: see `generate`.
      seed: of everything random, 0 … 2³² − 1.
      context: tokens of a conversation; None for 8192, or what the model has if that is less.
      as_json: print JSON: text, tokens, prompt_tokens, finish_reason, certificate (null where dense), timings.

    Raises:
      ValueError: an option out of range, a text that is missing or not UTF-8, no tokenizer, no chat template, more
        tokens than the model can have.
    """
    promise = certjax.Config(epsilon=epsilon, delta=delta)
    check_options(max_tokens, temperature, top_k, top_p, delta_scope)
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in 0 … {2**32 - 1}: got {seed}")
    start = time.monotonic()
    if prompt_file is not None:
        text = _standard_input() if prompt_file == "-" else read_text(prompt_file)[0]
    loaded, tokenizer = loading.load(checkpoint)
    with Progress("making the model", after=2):
        model_config = LlamaConfig.from_hf(loaded.config)
        if text is None:
            if tokenizer.chat_template is None:
                raise ValueError(f"{checkpoint}: the model has no chat template; give a text to continue")
            ids = []
            room = min(CHAT_CONTEXT, model_config.max_positions) if context is None else context
        else:
            ids = tokenizer.encode(text)
            if not ids:
                raise ValueError("the prompt is empty: give a text to continue")
            room = len(ids) + max_tokens
        if model_config.rope.context is not None:  # embeddings that depend on the length of a context are told it
            model_config = model_config.with_context(room)
        model = load_model(loaded.params, model_config, attention=attention)
        del loaded
    session, key = Session(model, room, tokenizer.eos_ids), jax.random.key(seed)
    load_s = time.monotonic() - start

    def answer(ids: list[int], turn: int) -> str:
        pieces = tokenizer.stream()
        say = lambda piece: None if as_json else print(piece, end="", flush=True)
        try:
            result = session.answer(
                ids, max_new_tokens=max_tokens, rng=jax.random.fold_in(key, turn),
                on_token=lambda token: say(pieces.push(token)), temperature=temperature, top_k=top_k, top_p=top_p,
                certified_config=promise, delta_scope=delta_scope,
            )  # fmt: skip
        except KeyboardInterrupt:
            say("\n")
            raise
        say(f"{pieces.flush()}\n")
        said = tokenizer.decode(result.tokens)
        certificate = None
        if attention == "certified":
            certificate = certificate_summary(result, promise, delta_scope, max_tokens)
        if as_json:
            print(json.dumps(_facts(result, said, ids, certificate, load_s), ensure_ascii=False), flush=True)
        else:
            print(_line(result, certificate), file=sys.stderr)
        return said

    if text is not None:
        answer(ids, 0)
        return
    messages: list[dict[str, str]] = []
    for turn, line in enumerate(_lines()):
        messages.append({"role": "user", "content": line})
        said = answer(tokenizer.apply_chat_template(messages), turn)
        messages.append({"role": "assistant", "content": said})


def _facts(
    result: Answer, said: str, ids: list[int], certificate: dict[str, Any] | None, load_s: float
) -> dict[str, Any]:
    return {
        "text": said,
        "tokens": result.tokens,
        "finish_reason": result.finish_reason,
        "prompt_tokens": len(ids),
        "prompt_tokens_read": result.read,
        "certificate": certificate,
        "timings": {
            "load_s": load_s,
            "prefill_s": result.prefill_s,
            "decode_s": result.decode_s,
            "tokens_per_s": result.tokens_per_s,
        },
    }


def _line(result: Answer, c: dict[str, Any] | None) -> str:
    """What a reader wants to know of an answer, in one line."""
    speed = "" if result.tokens_per_s is None else f", {result.tokens_per_s:.1f} tokens/s"
    parts = [f"{len(result.tokens)} tokens ({result.finish_reason}){speed}"]
    if c is not None and c["calls"]:
        parts.append(f"{c['calls']} attention calls, {c['sampled']} sampled and {c['exact']} exact")
        scope = "for each call" if c["delta_scope"] == "call" else "for all of them"
        parts.append(
            f"error ≤ {c['epsilon']} M with probability ≥ 1 − {c['delta']} {scope}"
            if c["certified"] == c["calls"]
            else f"{c['calls'] - c['certified']} without a certificate"
        )
    return f"[{'; '.join(parts)}]"


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input: is not UTF-8 text: {error}") from error


def _lines() -> Iterator[str]:
    """What a user says, line by line; asks for it where somebody sits at the keyboard."""
    asks = sys.stdin.isatty()
    if asks:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (lines can be edited)
        print("Say something; an empty line or Ctrl-D ends the conversation.", file=sys.stderr)
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = input().strip()
        except EOFError:
            return
        if line:
            yield line
        elif asks:
            return
