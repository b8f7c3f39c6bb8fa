"""Perplexity of a text with certified decoding against dense decoding, and how far the predictions are apart.

    python -m certjax.eval.perplexity CHECKPOINT [--prompt FILE] [--tokens 8144] [--tail 512] [--prefill-dir DIR]

Protocol: the first `tokens` tokens of the text are prefilled (exact attention, bfloat16 caches); the caches are then
cut back by `tail` tokens, and these are fed one by one, teacher-forced, through decode steps with dense and with
certified attention, each with caches of its own. Positions beyond those that the model was trained for are scaled
(`demo.stretched`). The Kullback-Leibler divergence of a token is that of the certified step's prediction from the dense
one's, Σ p log(p / q), in nats.
"""

import argparse
import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval import demo
from certjax.eval.progress import Progress
from certjax.models import Tokenizer, checkpoints
from certjax.models.llama import Llama, LlamaConfig, load_model
from certjax.types import BLOCK

_PART = 64  # tokens between two reports of progress


@functools.partial(jax.jit, static_argnames=("structures",), donate_argnames=("states",))
def _feed(structures, weights, states, ids, rng, config):
    """Feeds ids[:-1] to both models; returns their states and, for every token, what `run` reports of it."""
    models: list[Llama] = [jax.tree.unflatten(structure, weights) for structure in structures]

    def step(states, token):
        current, following = token
        predictions, new, statistics = [], [], {}
        for model, (caches, hints) in zip(models, states, strict=True):
            key = jax.random.fold_in(rng, caches[0].length[0])
            logits, caches, hints, statistics = model.decode_step(current[None], caches, hints, rng=key, config=config)
            predictions.append(jax.nn.log_softmax(logits[0]))
            new.append((caches, hints))
        dense, certified = predictions
        return tuple(new), {
            "dense": -dense[following],
            "certified": -certified[following],
            "divergence": jnp.sum(jnp.exp(dense) * (dense - certified)),
            "agree": jnp.argmax(dense) == jnp.argmax(certified),
            "keys": statistics["keys_read"].mean(),
            "exact": statistics["exact"].mean(),
            "all_certified": statistics["certified"].all(),
        }

    return jax.lax.scan(step, states, (ids[:-1], ids[1:]))


def run(
    checkpoint: str,
    *,
    prompt_file: str | None = None,
    tokens: int = 8144,
    tail: int = 512,
    epsilon: float = 0.1,
    delta_total: float = 0.01,
    seed: int = 0,
    prefill_dir: str | None = None,
) -> dict[str, float | int | str | bool]:
    """Measures; see the module for the protocol.

    Args:
      checkpoint: folder made by `certjax convert`, with a tokenizer.
      prompt_file: UTF-8 text; None for the language reference that every CPython carries.
      tokens: of the text.
      tail: how many of them are predicted in decode steps, a multiple of 64.
      epsilon: value measure.
      delta_total: over the whole tail.
      seed: of the perturbations.
      prefill_dir: as in `demo.run`; the same snapshots.

    Returns:
      Perplexities of the tail and their relative difference, divergence (mean, 99.9th percentile, largest), the share
      of tokens on whose most likely successor both agree, and what the certificates said.

    Raises:
      ValueError: a text that is too short, a tail that does not fit, and as for `demo.run`.

    Memory: weights and three copies of the caches at the start, two later.
    """
    if not 0 < tail < tokens or tail % _PART:
        raise ValueError(f"tail must be a multiple of {_PART} below tokens = {tokens}: got {tail}")
    text, source = demo.read_text(prompt_file)
    loaded = checkpoints.load(checkpoint)
    if loaded.tokenizer is None:
        raise ValueError(f"{checkpoint}: has no tokenizer; convert a model that carries one")
    ids = Tokenizer(loaded.tokenizer, loaded.tokenizer_config).encode(text)[:tokens]
    if len(ids) < tokens:
        raise ValueError(f"{source} has {len(ids)} tokens, fewer than tokens = {tokens}; give a longer text")
    capacity = -(-tokens // BLOCK) * BLOCK
    config = LlamaConfig.from_hf(loaded.config)
    stretch = max(capacity / config.max_positions, 1.0)
    config = demo.stretched(config, capacity)
    model = load_model(loaded.params, config)
    del loaded
    start, _ = demo.prefilled(model, ids, capacity, prefill_dir)
    # The first token of the tail is fed as the last that the cut caches do not hold.
    length = jnp.full((1,), tokens - tail - 1, jnp.int32)
    cut = tuple(dataclasses.replace(cache, length=length) for cache in start.caches)
    del start
    states = tuple((jax.tree.map(jnp.copy, cut), model.init_hints(1)) for _ in range(2))
    del cut
    delta = certjax.delta_per_call(delta_total, heads=config.num_heads, layers=config.num_layers, steps=tail)
    promise = certjax.Config(epsilon=epsilon, delta=delta)
    weights, _ = jax.tree.flatten(model)
    structures = tuple(jax.tree.structure(model.with_attention(name)) for name in ("dense", "certified"))
    rest, parts = np.asarray(ids[-tail - 1 :], np.int32), []
    with Progress("decode steps", "tokens") as progress:
        for first in range(0, tail, _PART):
            part = jnp.asarray(rest[first : first + _PART + 1])
            states, facts = _feed(structures, weights, states, part, jax.random.key(seed), promise)
            parts.append(jax.device_get(facts))
            progress(first + _PART, tail)
    facts = {name: np.concatenate([part[name] for part in parts]).astype(np.float64) for name in parts[0]}
    dense, certified = (float(np.exp(facts[name].mean())) for name in ("dense", "certified"))
    return {
        "text": source,
        "tokens": tokens,
        "tail": tail,
        "stretch": stretch,
        "epsilon": epsilon,
        "delta_total": delta_total,
        "seed": seed,
        "perplexity_dense": dense,
        "perplexity_certified": certified,
        "relative_difference": certified / dense - 1,
        "divergence_mean": float(facts["divergence"].mean()),
        "divergence_p999": float(np.percentile(facts["divergence"], 99.9)),
        "divergence_largest": float(facts["divergence"].max()),
        "agreement": float(facts["agree"].mean()),
        "largest_nll_difference": float(np.abs(facts["certified"] - facts["dense"]).max()),
        "keys_mean": float(facts["keys"].mean()),
        "exact_share": float(facts["exact"].mean()),
        "all_certified": bool(facts["all_certified"].all()),
    }


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--prompt", dest="prompt_file", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=8144)
    parser.add_argument("--tail", type=int, default=512)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--delta", dest="delta_total", type=float, default=0.01, help="over the whole tail")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-dir", metavar="DIR")
    print(json.dumps(run(**vars(parser.parse_args())), indent=1))


if __name__ == "__main__":
    main()
