"""`certjax eval ppl`: perplexity of the next tokens of a text, and how far predictions are from dense attention's.

Protocol. After n tokens, read with exact attention, the next tokens of the text are fed one by one (teacher-forced)
through decode steps, for each kind of attention from the same caches. Reported are the perplexity of these tokens, and
against dense attention the Kullback-Leibler divergence of each prediction, Σ p log(p / q) in nats, and whether the most
likely token is the same. Keys are those of a query head and step, window included. Rivals get budgets with which they
read, all in all, at most 1.1 times the keys that certified attention with the named ε reads when it always samples;
tokens after the first n, which their indexes do not hold, are read exactly and count among these. With a hundred tokens
the 99.9th percentile is the largest value.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.models.llama import Llama
from certjax.models.llama.modeling import Caches, DecodeAttention

_PART = 32  # tokens a call


def predictions(
    model: Llama,
    attention: str | DecodeAttention,
    caches: Caches,
    hints: tuple | None,
    ids: list[int],
    *,
    config: "certjax.Config",
    seed: int = 0,
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Feeds ids[:-1] after what the caches hold, which are left as they are.

    Args:
      model: the model.
      attention: as in `Llama.with_attention`.
      caches: of one row.
      hints: one a layer; None for fresh ones.
      ids: tokens.
      config: for the attention, δ that of a single call.
      seed: of the perturbations.

    Returns:
      Logarithms of the predicted probabilities, float32 [T, V], and statistics [T] averaged over layers and heads.

    Memory: a copy of the caches, and T·V floats.
    """
    weights, structure = jax.tree.flatten(model.with_attention(attention))
    # Copies: the states are donated, and layers may share an array.
    state = jax.tree.map(jnp.copy, (caches, model.init_hints(1) if hints is None else hints))
    parts = []
    for first in range(0, len(ids) - 1, _PART):
        part = jnp.asarray(ids[first : min(first + _PART, len(ids) - 1)], jnp.int32)
        state, found = _feed(structure, weights, state, part, jax.random.key(seed), config)
        parts.append(jax.device_get(found))
    log_p, facts = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    return log_p, facts


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _feed(structure, weights, state, ids, rng, config):
    model: Llama = jax.tree.unflatten(structure, weights)

    def step(state, token):
        caches, hints = state
        key = jax.random.fold_in(rng, caches[0].length[0])
        logits, caches, hints, facts = model.decode_step(token[None], caches, hints, rng=key, config=config)
        means = {name: facts[name].mean() for name in ("keys_read", "bytes_read", "exact", "certified")}
        return (caches, hints), (jax.nn.log_softmax(logits[0]), means)

    return jax.lax.scan(step, state, ids)


def row(log_p: np.ndarray, facts: dict[str, np.ndarray], dense: np.ndarray, following: list[int]) -> dict[str, Any]:
    """What a table says of predictions.

    Args:
      log_p: of the method, [T, V].
      facts: statistics of `predictions`.
      dense: of dense attention, [T, V].
      following: the true tokens, [T].
    """
    at = np.arange(len(following))
    nll, dense_nll = (-x[at, following].astype(np.float64) for x in (log_p, dense))
    divergence = (np.exp(dense) * (dense - log_p)).sum(-1, dtype=np.float64)
    return {
        "tokens": len(following),
        "perplexity": float(np.exp(nll.mean())),
        "perplexity_dense": float(np.exp(dense_nll.mean())),
        "relative_difference": float(np.exp((nll - dense_nll).mean()) - 1),
        # Of the mean difference of the log likelihoods: a difference beyond twice this is no chance.
        "nll_difference": float((nll - dense_nll).mean()),
        "nll_difference_error": float((nll - dense_nll).std(ddof=1) / np.sqrt(len(following))),
        "kl_mean": float(divergence.mean()),
        "kl_p999": float(np.percentile(divergence, 99.9)),
        "kl_max": float(divergence.max()),
        "top1_agreement": float((log_p.argmax(-1) == dense.argmax(-1)).mean()),
        "keys": float(facts["keys_read"].mean()),
        "bytes": float(facts["bytes_read"].mean()),
        "exact_share": float(facts["exact"].mean()),
    }
