"""Attention inputs of a model that reads a text: caches of all layers, and the queries of the newest positions."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval import demo
from certjax.eval.texts import Text
from certjax.models import Tokenizer
from certjax.models.checkpoints import Checkpoint
from certjax.models.llama import Llama, LlamaConfig, load_model
from certjax.models.llama.modeling import Caches

PAST = 120  # recorded positions before the measured ones, which methods may look at
STEPS = 8  # newest positions that are measured
_PART = 32  # steps a call


@dataclasses.dataclass(frozen=True)
class Recorded:
    """What a model holds after reading n tokens.

    Attributes:
      caches: one a layer, batch 1, all n tokens.
      queries: float32 [L, T, N, H] after RoPE, of the newest T positions.
      ids: the n tokens.
    """

    caches: Caches
    queries: np.ndarray
    ids: list[int]

    def before(self, layer: int, back: int = 0) -> "certjax.KVCache":
        """The cache of a layer as the query `back` positions before the newest one saw it."""
        cache = self.caches[layer]
        return dataclasses.replace(cache, length=cache.length - back)


def model_for(loaded: Checkpoint, positions: int) -> Llama:
    """The model, its positions scaled where the context is longer than what it was trained for (`demo.stretched`)."""
    return load_model(loaded.params, demo.stretched(LlamaConfig.from_hf(loaded.config), positions))


def tokens(text: Text, tokenizer: Tokenizer, n: int) -> list[int]:
    """The first n tokens.

    Raises:
      ValueError: the text has fewer.
    """
    ids = tokenizer.encode(text.text[: 16 * n])  # enough of most texts; the whole Bible takes seconds
    if len(ids) < n:
        ids = tokenizer.encode(text.text)
    if len(ids) < n:
        raise ValueError(f"{text.source} has {len(ids)} tokens, fewer than {n}; give a longer text")
    return ids[:n]


def record(
    model: Llama,
    ids: list[int],
    *,
    past: int = PAST,
    steps: int = STEPS,
    spare: int = 0,
    prefill_dir: str | None = None,
) -> Recorded:
    """Reads tokens with exact attention; the newest past + steps one by one, which gives their queries.

    Args:
      model: the model.
      ids: n tokens, a multiple of 64, more than past + steps.
      past: positions recorded before the measured ones.
      steps: measured positions.
      spare: tokens that the caches can hold beyond these.
      prefill_dir: as for `demo.prefilled`.

    Memory: weights and two copies of the caches.
    """
    fed = past + steps
    start, _ = demo.prefilled(model, ids[:-fed], len(ids) + spare, prefill_dir)
    weights, structure = jax.tree.flatten(model.with_attention(_recording))
    caches, queries = start.caches, []
    del start
    for first in range(len(ids) - fed, len(ids), _PART):
        part = jnp.asarray(ids[first : first + _PART], jnp.int32)
        caches, query = _feed(structure, weights, caches, part)
        queries.append(np.asarray(query))
    return Recorded(caches, np.concatenate(queries).swapaxes(0, 1), ids)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _feed(structure, weights, caches, ids):
    """Queries [T, L, N, H] of the tokens."""
    model: Llama = jax.tree.unflatten(structure, weights)

    def step(caches, token):
        _, caches, _, metrics = model.decode_step(
            token[None], caches, model.init_hints(1), rng=jax.random.key(0), config=certjax.Config()
        )
        return caches, metrics["query"][:, 0]

    return jax.lax.scan(step, caches, ids)


def _recording(query, cache, *, rng, hint, config):
    """Dense attention that reports its queries."""
    del rng, hint
    return certjax.dense_decode_attention(query, cache, config=config), {"query": query[:, 0]}
