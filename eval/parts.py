"""Where the time of a decode step goes: attention, other layers' weights, output head, choice of the token, host.

    python -m certjax.eval.parts CHECKPOINT [--n 8144] [--tokens 32] [--rounds 5] [--prefill-dir DIR] [--json]

Protocol. After a text of n tokens the same number of tokens is generated in one compiled program, with certified, with
dense and with no attention (which only appends), in turn; a time is the median over the rounds, a token. Attention is
what a program takes beyond the one without. Head and choice are timed alone, in a compiled loop of their own. Weights
are the rest of the program without attention, with norms, rotary embedding and appends. Host is what a step takes more
when every token is handed out (`stream`). Beside them: what reading their bytes takes at the speed of a plain pass over
memory, measured in the same rounds.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax import isa
from certjax.eval import demo, inputs, loading, texts
from certjax.eval.bench_methods import read_all
from certjax.models.llama import Llama, decode
from certjax.models.llama.sampling import sample

_LOOP = 16  # calls of head and choice in a loop


def run(
    checkpoint: str, *, n: int = 8144, tokens: int = 32, rounds: int = 5, prefill_dir: str | None = None
) -> dict[str, Any]:
    """Measures; see the module for the protocol.

    Args:
      checkpoint: folder made by `certjax convert`, with a tokenizer.
      n: tokens read before; beyond what the model was trained for, positions are scaled (`demo.stretched`).
      tokens: generated in each program.
      rounds: repetitions.
      prefill_dir: as for `demo.run`.

    Returns:
      Milliseconds a token by part, for certified and dense attention, and what their bytes take.

    Raises:
      ValueError: as for `demo.run`.
    """
    loaded, tokenizer = loading.load(checkpoint)
    context = n + tokens
    ids = inputs.tokens(texts.read("reference"), tokenizer, n)
    model = inputs.model_for(loaded, context)
    del loaded
    start, _ = demo.prefilled(model, ids, context, prefill_dir)
    config = model.config
    delta = certjax.delta_per_call(0.01, heads=config.num_heads, layers=config.num_layers, steps=tokens)
    promise = certjax.Config(epsilon=0.1, delta=delta)

    def generate(attention, stream=None):
        caches = jax.block_until_ready(jax.tree.map(jnp.copy, start.caches))
        begin = time.perf_counter()
        result, _ = decode(
            model.with_attention(attention), start.logits, caches, max_new_tokens=tokens, rng=jax.random.key(0),
            certified_config=promise, stream=stream,
        )  # fmt: skip
        jax.block_until_ready(result)
        return (time.perf_counter() - begin) / (tokens - 1)

    head = np.asarray((model.embedding if model.head is None else model.head.kernel)[...])
    weights = [head] + [np.asarray(x) for x in jax.tree.leaves(model.layers) if x.ndim > 1]
    runs: dict[str, Callable[[], float]] = {
        "certified": lambda: generate("certified"),
        "dense": lambda: generate("dense"),
        "nothing": lambda: generate(_nothing),
        "streamed": lambda: generate("certified", lambda *_: None),
        "head": functools.partial(_looped, _heads, model, jnp.ones((1, 1, config.hidden_size), jnp.float32)),
        "choice": functools.partial(_looped, _choices, start.logits, jax.random.split(jax.random.key(0), 1)),
        "stream": lambda: _timed(lambda: read_all(*(w.view(np.uint16) for w in weights))),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for r in range(rounds + 1):  # the first one compiles
        for name, function in runs.items():
            spent = function()
            if r:
                times[name].append(1e3 * spent)
    ms = {name: statistics.median(x) for name, x in times.items()}
    total_bytes = sum(w.nbytes for w in weights)
    at_stream_speed = lambda count: ms["stream"] * count / total_bytes
    return {
        "n": n,
        "isa": isa.active(),
        "certified": ms["certified"],
        "dense": ms["dense"],
        "parts": {
            "attention, certified": ms["certified"] - ms["nothing"],
            "attention, dense": ms["dense"] - ms["nothing"],
            "weights of the layers": ms["nothing"] - ms["head"] - ms["choice"],
            "head": ms["head"],
            "choice": ms["choice"],
            "host, streaming": ms["streamed"] - ms["certified"],
        },
        "at_stream_speed": {
            "weights of the layers": at_stream_speed(total_bytes - head.nbytes),
            "head": at_stream_speed(head.nbytes),
            "attention, dense": at_stream_speed(2 * start.caches[0].key.nbytes * config.num_layers * n / context),
        },
        "gb_per_s": total_bytes / ms["stream"] / 1e6,
        "rounds": rounds,
    }


def _nothing(query, cache, *, rng, hint, config):
    """Attention that reads nothing."""
    del cache, rng, config
    B, _, N, _ = query.shape
    number, count, no = jnp.zeros((B, N), jnp.float32), jnp.zeros((B, N), jnp.int32), jnp.zeros((B, N), bool)
    certificate = certjax.Certificate(
        certified=no, exact=no, error_bound=number, level=count, threshold=number, keys_read=count, candidates=count,
        bytes_read=number, log_normalizer=number, value_scale_lower=number,
    )  # fmt: skip
    return certjax.AttentionResult(query, certificate, hint)


@jax.jit
def _heads(model: Llama, x: jax.Array) -> jax.Array:
    # Each input depends on the output before, so that nothing is left out.
    return jax.lax.fori_loop(0, _LOOP, lambda _, x: x + 1e-9 * model.logits(x)[..., : x.shape[-1]], x)


@jax.jit
def _choices(logits: jax.Array, rng: jax.Array) -> jax.Array:
    def choose(_, carry):
        logits, total = carry
        token = sample(logits, rng, temperature=None, top_k=None, top_p=None)
        return logits + 1e-9 * token.astype(jnp.float32)[:, None], total + token

    return jax.lax.fori_loop(0, _LOOP, choose, (logits, jnp.zeros(len(logits), jnp.int32)))[1]


def _looped(function: Callable[..., Any], *args: Any) -> float:
    return _timed(lambda: jax.block_until_ready(function(*args))) / _LOOP


def _timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--n", type=int, default=8144, help="tokens read before (%(default)s)")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prefill-dir", metavar="DIR")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    result = run(args.checkpoint, n=args.n, tokens=args.tokens, rounds=args.rounds, prefill_dir=args.prefill_dir)
    if args.json:
        print(json.dumps(result, indent=1))
        return
    print(f"n {result['n']}, {result['isa']}, plain reads {result['gb_per_s']:.1f} GB/s; ms a token:")
    print(f"{'whole step':<24}certified {result['certified']:.2f}  dense {result['dense']:.2f}")
    for name, ms in result["parts"].items():
        stream = result["at_stream_speed"].get(name)
        print(f"{name:<24}{ms:8.2f}" + ("" if stream is None else f"   its bytes at stream speed {stream:.2f}"))


if __name__ == "__main__":
    main()
