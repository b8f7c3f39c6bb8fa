"""Retrieval strategies as the attention of a model's decode steps, and how long their parts take.

An index is made of the context of every layer and kv head, once; the sinks and the newest tokens of the context are
read exactly, and so is every token that comes after it. Indexes travel through the layers' hints.
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax import retrieval
from certjax.eval.errors import rows_of
from certjax.eval.inputs import Recorded
from certjax.retrieval import host, strategies
from certjax.retrieval import strategy as stages


@dataclasses.dataclass(frozen=True)
class RetrievalAttention:
    """A `DecodeAttention` over hints of `build`; batch 1. Certifies nothing.

    Its statistics: `hits` [1, N], how many of the keys that exact search would have found were found, and `wanted`
    [1, N], how many that are. The search is that of the strategy: by perturbed scores where it samples by priority.
    """

    strategy: retrieval.Strategy

    def __call__(self, query, cache, *, rng, hint, config):
        """Attends query [1, 1, N, H]."""
        del rng, config
        B, K, _, H = cache.shape
        if B != 1:
            raise ValueError(f"an index is made from one row: got a batch of {B}")
        key, value = (rows_of(x[0], cache.dtype) for x in (cache.key, cache.value))
        grouped = query[0, 0].astype(jnp.float32).reshape(K, -1, H)

        def one(x):
            q, k, v, index = x
            found = self.strategy.attend(q, k, v, index, length=cache.length[0])
            return found, *_recall(self.strategy, q, k, index, found.ids)

        found, hits, wanted = jax.lax.map(one, (grouped, key, value, hint))
        flat = lambda x: x.reshape(1, -1)
        no, zero = jnp.zeros((1, grouped.shape[0] * grouped.shape[1]), bool), flat(found.log_denominator) * 0
        certificate = certjax.Certificate(
            certified=no, exact=no, error_bound=zero + jnp.inf, level=zero.astype(jnp.int32) - 1, threshold=zero,
            keys_read=flat(found.keys_used), candidates=flat(found.keys_requested + found.keys_direct),
            bytes_read=zero + jnp.nan,  # what an oracle reads is its own affair
            log_normalizer=flat(found.log_denominator), value_scale_lower=zero,
        )  # fmt: skip
        result = certjax.AttentionResult(found.output.reshape(query.shape).astype(query.dtype), certificate, hint)
        return result, {"hits": flat(hits), "wanted": flat(wanted), "failed": flat(found.failed)}


def _recall(strategy, query, keys, index, ids):
    """Found among the m best of the pool [G], and m [G]."""
    pool = keys[index.start : index.stop].astype(jnp.float32)
    score = jnp.einsum("gh,nh->gn", query, pool) * (
        keys.shape[-1] ** -0.5 if strategy.scale is None else strategy.scale
    )
    if isinstance(strategy, strategies.PriorityStrategy):
        score += index.exponentials[None]
    if isinstance(strategy, retrieval.TopKSampling):
        ids = ids[:, : strategy.budget // 2]  # the others are drawn, not searched for
    m = min(ids.shape[1], pool.shape[0])
    if not m:
        none = jnp.zeros(query.shape[0], jnp.int32)
        return none, none
    least = jax.lax.top_k(score, m)[0][:, -1:]
    found = jnp.take_along_axis(score, jnp.maximum(ids - index.start, 0), 1) >= least
    return (found & (ids >= 0)).sum(-1, dtype=jnp.int32), jnp.full(query.shape[0], m, jnp.int32)


def build(
    strategy: retrieval.Strategy, oracle: retrieval.Oracle, recorded: Recorded, *, seed: int = 0
) -> tuple[tuple, float]:
    """Indexes over what a model holds of a context.

    Args:
      strategy: which keys are asked for.
      oracle: what is built; trained on the recorded queries of its kv head where it can be.
      recorded: caches and queries.
      seed: of the draws; layers and kv heads have their own.

    Returns:
      One `Index` a layer, with a leading axis of K kv heads, and the seconds that it took.
    """
    hints, seconds, n = [], 0.0, len(recorded.ids)
    T, N, H = recorded.queries.shape[1:]
    for layer, cache in enumerate(recorded.caches):
        K = cache.shape[1]
        queries = recorded.queries[layer].reshape(T, K, N // K, H)
        rngs = jax.random.split(jax.random.fold_in(jax.random.key(seed), layer), K)
        keys = rows_of(cache.key[0, :, :n], cache.dtype)
        make = lambda k: strategy.build(keys[k], rngs[k], oracle, queries=queries[:, k].reshape(-1, H))  # noqa: B023
        if not layer:
            retrieval.release(make(0))  # JAX compiles the draws
        start = time.perf_counter()
        hint = jax.tree.map(lambda *x: jnp.stack(x), *(make(k) for k in range(K)))
        seconds += time.perf_counter() - start
        hints.append(hint)
    return tuple(hints), seconds


def release(hints: tuple) -> None:
    """Frees what `build` made outside JAX."""
    for hint in hints:
        if hint.handle is not None:
            for handle in np.asarray(hint.handle):
                host.release(jnp.int32(handle))


class _Timed:
    """A retriever that adds up the seconds that its answers take."""

    def __init__(self, inner: host.Retriever):
        self.inner, self.seconds = inner, 0.0

    def retrieve(self, queries: np.ndarray, count: int) -> host.Found:
        start = time.perf_counter()
        found = self.inner.retrieve(queries, count)
        self.seconds += time.perf_counter() - start
        return found

    def append(self, points: np.ndarray, exponentials: np.ndarray) -> None:
        self.inner.append(points, exponentials)


def component_seconds(
    strategy: retrieval.Strategy, recorded: Recorded, hints: tuple, *, rounds: int = 3
) -> dict[str, float]:
    """Seconds of a decode step's parts, all layers together, for the newest recorded query; medians over the rounds.

    Returns:
      `search`: within the oracles, and the strategy's own work on their answers. `movement`: what asking them takes
      beyond that, queries and answers passing between JAX and the host; 0 where the search itself is JAX's.
      `attention`: gathering the keys and values, and the softmax over them, the sinks and the newest tokens.
    """
    parts: dict[str, Any] = {"search": 0.0, "movement": 0.0, "attention": 0.0}
    H = recorded.queries.shape[-1]
    for layer, (cache, hint) in enumerate(zip(recorded.caches, hints, strict=True)):
        query = jnp.asarray(recorded.queries[layer, -1].reshape(cache.shape[1], -1, H))
        timed = []
        if hint.handle is not None:
            timed = [_Timed(host.registered(handle)) for handle in np.asarray(hint.handle)]
            hint = dataclasses.replace(hint, handle=jnp.stack([host.register(x) for x in timed]))
        seconds = []
        for _ in range(rounds + 1):
            before = sum(x.seconds for x in timed)
            start = time.perf_counter()
            retrieved = jax.block_until_ready(_retrieve(strategy, query, hint))
            middle = time.perf_counter()
            jax.block_until_ready(_finish(strategy, retrieved, query, cache, hint))
            end = time.perf_counter()
            search = sum(x.seconds for x in timed) - before if timed else middle - start
            seconds.append((search, middle - start - search, end - middle))
        if timed:
            release((hint,))
        for name, x in zip(parts, np.median(seconds[1:], 0), strict=True):  # the first round may compile
            parts[name] += float(x)
    return parts


@functools.partial(jax.jit, static_argnums=0)
def _retrieve(strategy, query, hint):
    return jax.lax.map(lambda x: stages.retrieve(strategy, *x), (query, hint))


@functools.partial(jax.jit, static_argnums=0)
def _finish(strategy, retrieved, query, cache, hint):
    key, value = (rows_of(x[0], cache.dtype) for x in (cache.key, cache.value))
    one = lambda x: stages.finish(strategy, x[0], x[1], x[2], x[3], x[4], cache.length[0]).output
    return jax.lax.map(one, (retrieved, query, key, value, hint))
