"""Decode steps whose layers are called one by one from Python: one layer is compiled, for all layers and steps.

Much less to compile than a whole model for each kind of attention, at the price of the calls between the layers, which
every kind of attention pays alike.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import certjax
from certjax.models.llama import Llama
from certjax.models.llama.modeling import Caches, DecodeAttention

Facts = dict[str, np.ndarray]


class Stepper:
    """A model of full attention layers, batch 1, with one kind of attention.

    Args:
      model: the model.
      attention: of every layer. May return statistics, [1, N] each.
      config: for the attention, δ that of a single call.
      seed: of the perturbations.
      measure: compare each attention output with dense attention for the same query and cache.

    Raises:
      ValueError: the model has layers with a sliding window.
    """

    def __init__(
        self,
        model: Llama,
        attention: DecodeAttention,
        *,
        config: "certjax.Config",
        seed: int = 0,
        measure: bool = False,
    ):
        if any(window is not None for window in model.config.windows):
            raise ValueError("models with sliding-window layers cannot be run layer by layer: use another model")
        self.layers = list(model.layers)
        self.ends = model.with_attention("dense")
        self.ends.layers = nnx.List([])  # embedding, final norm and head alone
        self.attention, self.config, self.measure = attention, config, measure
        self.rng = jax.random.key(seed)

    def step(self, token: int, caches: Caches, hints: tuple) -> tuple[jax.Array, Caches, tuple, dict[str, jax.Array]]:
        """Feeds a token; the caches are used up.

        Returns:
          logits float32 [V], caches, hints; with `measure` statistics [L, N]: `context` [L, N, H] the outputs, `query`
          [L, N, H], `error` ‖ô − o‖², `size` ‖o‖², `keys`, `candidates`, `bytes` and what else the attention reports.
        """
        x, rotary, keys = _begin(self.ends, np.int32(token), caches[0].length, self.rng, len(self.layers))
        new_caches, new_hints, facts = [], [], []
        for i, layer in enumerate(self.layers):
            x, cache, hint, fact = _layer(
                layer, x, rotary, caches[i], hints[i], keys[i], self.config, self.attention, self.measure
            )
            new_caches.append(cache)
            new_hints.append(hint)
            facts.append(fact)
        stacked = {name: jnp.stack([fact[name] for fact in facts]) for name in facts[0]}
        return _end(self.ends, x), tuple(new_caches), tuple(new_hints), stacked

    def feed(self, ids: list[int], caches: Caches, hints: tuple) -> tuple[np.ndarray, Facts, Caches]:
        """Feeds tokens after what the caches hold, which are left as they are: logits [T, V], statistics [T, L, …], and
        the caches afterwards.
        """
        caches = jax.tree.map(jnp.copy, caches)
        logits, facts = [], []
        for token in ids:
            logit, caches, hints, fact = self.step(token, caches, hints)
            logits.append(np.asarray(logit))
            facts.append(jax.device_get(fact))
        return np.stack(logits), {name: np.stack([fact[name] for fact in facts]) for name in facts[0]}, caches

    def answer(
        self, ids: list[int], caches: Caches, hints: tuple, *, limit: int, ends: set[int], clock: Callable[[], float]
    ) -> tuple[list[int], list[float]]:
        """Feeds tokens, then what is most likely each time, until an end token or the limit.

        Returns:
          The chosen tokens, and the clock before the first token is fed and after each choice. The caches are left as
          they are.
        """
        caches = jax.tree.map(jnp.copy, caches)
        jax.block_until_ready(caches)
        times = [clock()]
        for token in ids:
            logits, caches, hints, _ = self.step(token, caches, hints)
        chosen = [int(jnp.argmax(logits))]
        times.append(clock())
        while len(chosen) < limit and chosen[-1] not in ends:
            logits, caches, hints, _ = self.step(chosen[-1], caches, hints)
            chosen.append(int(jnp.argmax(logits)))
            times.append(clock())
        return chosen, times


@functools.partial(jax.jit, static_argnums=4)
def _begin(ends: Llama, token: jax.Array, length: jax.Array, rng: jax.Array, layers: int) -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.fold_in(rng, length[0]), layers)
    return ends.embed(token[None, None]), ends.rotary(length[:, None]), tuple(keys[i] for i in range(layers))


@functools.partial(jax.jit, static_argnums=(7, 8), donate_argnums=3)
def _layer(layer, x, rotary, cache, hint, rng, config, attention, measure):
    def attend(query, key, value):
        new = certjax.append(cache, key, value)
        result = attention(query, new, rng=rng, hint=hint, config=config)
        result, extra = result if isinstance(result, tuple) else (result, {})
        facts = {}
        if measure:
            dense = certjax.dense_decode_attention(query, new, config=config).output
            norm = lambda x: (x[0, 0].astype(jnp.float32) ** 2).sum(-1)
            certificate = result.certificate
            facts = {name: fact[0] for name, fact in extra.items()} | {
                "context": result.output[0, 0],
                "query": query[0, 0],
                "error": norm(result.output - dense),
                "size": norm(dense),
                "keys": certificate.keys_read[0],
                "candidates": certificate.candidates[0],
                "bytes": certificate.bytes_read[0],
            }
        return result.output, (new, result.hint, facts)

    x, (new, hint, facts) = layer(x, rotary, attend)
    return x, new, hint, facts


def forget() -> None:
    """Frees compiled layers: indexes of many lengths make a program each."""
    _layer.clear_cache()  # type: ignore[attr-defined]


@jax.jit
def _end(ends: Llama, x: jax.Array) -> jax.Array:
    return ends.logits(x)[0, 0]


def dense(query, cache, *, rng, hint, config):
    """Dense attention as a `DecodeAttention`."""
    del rng, hint
    return certjax.dense_decode_attention(query, cache, config=config)


def certified(query, cache, *, rng, hint, config):
    """Certified attention as a `DecodeAttention`."""
    return certjax.decode_attention(query, cache, rng=rng, config=config, hint=hint)
