"""Perplexity of a text, dense and with certified decoding.

    python -m certjax.eval.perplexity CHECKPOINT [--prompt FILE] [--tokens 8192] [--tail 512]

Protocol: the first `tokens` tokens of the text, no begin token added. All but the last `tail` are prefilled (exact
attention, as in use); the tail is fed token by token, teacher-forced, through decode steps with certified or dense
attention. Both see the same tokens.
"""

import argparse
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.demo import read_text
from certjax.eval.progress import Progress
from certjax.models import Tokenizer, checkpoints
from certjax.models.llama import Llama, LlamaConfig, load_model, prefill


@functools.partial(jax.jit, static_argnames="structure")
def _tail(structure, weights, caches, ids, rng, config):
    """Feeds ids [T]; returns the negative log likelihood of ids[1:] [T − 1], keys read [T − 1], exact heads [T − 1]
    (means).
    """
    model: Llama = jax.tree.unflatten(structure, weights)

    def step(carry, token):
        caches, hints, t = carry
        current, following = token
        logits, caches, hints, stats = model.decode_step(
            current[None], caches, hints, rng=jax.random.fold_in(rng, t), config=config
        )
        nll = jax.nn.logsumexp(logits[0]) - logits[0, following]
        means = (stats["keys_read"].mean(), stats["exact"].mean(), stats["certified"].all())
        return (caches, hints, t + 1), (nll, *means)

    start = (caches, model.init_hints(1), jnp.int32(0))
    return jax.lax.scan(step, start, (ids[:-1], ids[1:]))[1]


def run(
    checkpoint: str, *, prompt_file: str | None, tokens: int, tail: int, epsilon: float, delta_total: float
) -> dict:
    """Measures; see the module for the protocol.

    Returns:
      Perplexities over all tokens and over the tail, their relative difference, and what the certificates said.

    Raises:
      ValueError: a text that is too short, or tokens beyond the model's longest context.
    """
    text, source = read_text(prompt_file)
    loaded = checkpoints.load(checkpoint)
    config = LlamaConfig.from_hf(loaded.config)
    ids = Tokenizer(loaded.tokenizer, loaded.tokenizer_config).encode(text, add_bos=False)[:tokens]
    if len(ids) < tokens or not 2 <= tail < tokens:
        raise ValueError(f"{source} has {len(ids)} tokens, tail is {tail}: need {tokens} tokens and 2 ≤ tail < tokens")
    model = load_model(loaded.params, config)
    head, rest = ids[: tokens - tail], np.asarray(ids[tokens - tail - 1 :], np.int32)
    nll = np.zeros(len(head) - 1)

    def collect(start, logits):
        targets = np.asarray(head[start + 1 : start + 1 + logits.shape[1]])
        rows = np.asarray(jax.nn.log_softmax(logits[0, : len(targets)]))
        nll[start : start + len(targets)] = -rows[np.arange(len(targets)), targets]

    caches = model.init_caches(1, tokens)
    with Progress("prefill", "tokens") as progress:
        _, caches = prefill(model, [head[:-1]], caches, chunk=256, progress=progress, on_logits=collect)
    delta = certjax.delta_per_call(delta_total, heads=config.num_heads, layers=config.num_layers, steps=tail)
    result = {"text": source, "tokens": tokens, "tail": tail, "epsilon": epsilon, "delta_total": delta_total}
    tails = {}
    for attention in ("dense", "certified"):
        weights, structure = jax.tree.flatten(model.with_attention(attention))
        nlls, keys, exact, certified = jax.device_get(
            _tail(structure, weights, caches, rest, jax.random.key(0), certjax.Config(epsilon=epsilon, delta=delta))
        )
        tails[attention] = nlls
        result[f"perplexity_tail_{attention}"] = float(np.exp(nlls.mean()))
        result[f"perplexity_{attention}"] = float(np.exp(np.concatenate([nll, nlls]).mean()))
        if attention == "certified":
            result |= {
                "keys_mean": float(keys.mean()),
                "exact_share": float(exact.mean()),
                "all_certified": bool(certified.all()),
            }
    for part in ("", "_tail"):
        result[f"relative_difference{part}"] = (
            result[f"perplexity{part}_certified"] / result[f"perplexity{part}_dense"] - 1
        )
    result["largest_nll_difference"] = float(np.abs(tails["certified"] - tails["dense"]).max())
    return result


def main() -> None:
    """Prints JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint")
    parser.add_argument("--prompt", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tail", type=int, default=512)
    parser.add_argument("--epsilon", type=float, default=0.1)
    parser.add_argument("--delta", type=float, default=0.01, help="over the whole tail")
    a = parser.parse_args()
    print(
        json.dumps(
            run(
                a.checkpoint, prompt_file=a.prompt, tokens=a.tokens, tail=a.tail, epsilon=a.epsilon, delta_total=a.delta
            ),
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
