"""Rival methods as the attention of a model's decode steps.

A rival knows the first n tokens, which its index was made from; every token that comes after them is read exactly,
and counted. Its index, and the cache rows that it may look at, travel through the layers' hints.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import certjax
from certjax.eval.errors import SINKS, WINDOW, rows_of
from certjax.eval.inputs import Recorded
from certjax.eval.methods.protocol import Method, Problem, softmax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerIndex:
    """What a method knows of a layer; travels as its hint.

    Attributes:
      problem: Problem with a leading axis of K kv heads, and empty keys and values: those of the cache are meant.
      index: of the method, the same axis.
      budget: of the method.
      n: the tokens that the index was made from (static).
    """

    problem: Problem
    index: Any
    budget: jax.Array
    n: int = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True)
class RivalAttention:
    """A `DecodeAttention` over hints of `make_indexes`; batch 1. Certifies nothing."""

    method: Method

    def __call__(self, query, cache, *, rng, hint, config):
        """Attends query [1, 1, N, H]."""
        del config
        B, K, S, H = cache.shape
        if B != 1:
            raise ValueError(f"a rival's index is made from one row: got a batch of {B}")
        key, value = (rows_of(x[0], cache.dtype) for x in (cache.key, cache.value))
        n, grouped = hint.n, query[0, 0].astype(jnp.float32).reshape(K, -1, H)
        problem = dataclasses.replace(hint.problem, keys=key[:, :n], values=value[:, :n])
        budgets, keys = jnp.broadcast_to(hint.budget, K), jax.random.split(rng, K)
        found = jax.lax.map(lambda x: self.method.attend(*x), (problem, hint.index, grouped, budgets, keys))
        later = jnp.arange(n, S) < cache.length[0]
        score = jnp.einsum("kgh,ksh->kgs", grouped, key[:, n:].astype(jnp.float32)) * problem.scale
        log_later = jax.nn.logsumexp(jnp.where(later, score, -jnp.inf), axis=-1)
        output = jnp.einsum("kgs,ksh->kgh", softmax(score, later), value[:, n:].astype(jnp.float32))
        share = jax.nn.sigmoid(found.log_normalizer - log_later)[..., None]
        output = share * found.output + (1 - share) * output
        count = later.sum(dtype=jnp.int32)
        flat = lambda x: jnp.broadcast_to(x, grouped.shape[:2]).reshape(1, -1)
        row = 2 * H * problem.keys.dtype.itemsize
        no = flat(jnp.zeros((), bool))
        zero = flat(jnp.float32(0))
        certificate = certjax.Certificate(
            certified=no, exact=no, error_bound=zero + jnp.inf, level=flat(jnp.int32(-1)), threshold=zero,
            keys_read=flat(found.keys_read + count), candidates=flat(found.keys_read + count),
            bytes_read=flat(found.bytes_read + count.astype(jnp.float32) * (row / grouped.shape[1])),
            log_normalizer=flat(jnp.logaddexp(found.log_normalizer, log_later)), value_scale_lower=zero,
        )  # fmt: skip
        return certjax.AttentionResult(output.reshape(query.shape).astype(query.dtype), certificate, hint)


def make_indexes(
    method: Method, recorded: Recorded, rotary: tuple[jax.Array, jax.Array], budget: float, seed: int = 0
) -> tuple:
    """One `LayerIndex` a layer, from what was recorded.

    Args:
      method: traceable.
      recorded: attention inputs.
      rotary: cos and sin [P, H / 2] of positions 0 … n.
      budget: as `Method.attend` takes it.
      seed: of what the indexes draw.

    Raises:
      ValueError: a method that cannot be traced.
    """
    if not method.traceable:
        raise ValueError(f"{method.name} runs in numpy and cannot be a model's attention")
    L, T, N, H = recorded.queries.shape
    n, K = len(recorded.ids), recorded.caches[0].shape[1]
    number = jnp.float32(budget) if method.knob else jnp.int32(budget)
    prepare = jax.jit(lambda problem, rngs: jax.lax.map(lambda x: method.prepare(*x), (problem, rngs)))
    hints = []
    for layer, cache in enumerate(recorded.caches):
        key, value = (rows_of(x[0, :, :n], cache.dtype) for x in (cache.key, cache.value))
        past = jnp.asarray(recorded.queries[layer].reshape(T, K, N // K, H).swapaxes(0, 1))
        over = lambda x: jnp.broadcast_to(x, (K, *jnp.shape(x)))
        problem = Problem(
            key, value, past, over(jnp.arange(n - T, n, dtype=jnp.int32)), over(rotary[0]), over(rotary[1]),
            layer=over(jnp.int32(layer)), layers=over(jnp.int32(L)), scale=H**-0.5, sinks=SINKS, window=WINDOW,
        )  # fmt: skip
        index = prepare(problem, jax.random.split(jax.random.fold_in(jax.random.key(seed), layer), K))
        empty = key[:, :0]
        hints.append(LayerIndex(dataclasses.replace(problem, keys=empty, values=empty), index, number, n))
    return tuple(hints)
