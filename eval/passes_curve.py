"""Attention error against the budget k, for recorded queries; no model is run.

Protocol. A model has read a text; the queries are those of its newest positions, in layers that lie evenly over it.
Sinks and the newest keys are exact for everyone, the rest are the pool. Strategies ask `Flat`; those that draw are
pooled over draws. Certified attention always samples where it can, and gets for each k the smallest ε whose mean keys a
query head, exact heads included, stay within k (or, for bytes, within what SoftmaxLift reads with Flat).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax import retrieval
from certjax.eval.errors import rows_of
from certjax.eval.inputs import STEPS, Recorded

DRAWS = 2
EPSILONS = (0.01, 0.95)  # ends of the bisection
_BISECTIONS = 7


@dataclasses.dataclass(frozen=True)
class Queries:
    """Queries of some positions in some layers, and dense attention's outputs.

    Attributes:
      recorded: what the model holds.
      layers: which.
      backs: positions, counted back from the newest one, 0.
      outputs: float32 [layers, backs, N, H].
    """

    recorded: Recorded
    layers: tuple[int, ...]
    backs: tuple[int, ...]
    outputs: np.ndarray

    def each(self):
        """Layer, query [1, 1, N, H], the cache that it saw, and dense attention's output [N, H]."""
        for i, layer in enumerate(self.layers):
            for j, back in enumerate(self.backs):
                query = jnp.asarray(self.recorded.queries[layer, -1 - back][None, None])
                yield layer, query, self.recorded.before(layer, back), self.outputs[i, j]


def queries_of(recorded: Recorded, layers: int, backs: Sequence[int] = range(STEPS)) -> Queries:
    """Those of so many layers, evenly spaced."""
    last = len(recorded.caches) - 1
    chosen = tuple(sorted({round(float(x)) for x in np.linspace(0, last, min(layers, last + 1))}))
    empty = Queries(recorded, chosen, tuple(backs), np.zeros((len(chosen), len(backs))))
    outputs = [np.asarray(_dense(query, cache)) for _, query, cache, _ in empty.each()]
    stacked = np.stack(outputs).reshape(len(chosen), len(backs), *outputs[0].shape)
    return dataclasses.replace(empty, outputs=stacked)


@jax.jit
def _dense(query, cache):
    return certjax.dense_decode_attention(query, cache).output[0, 0]


def relative(error: Any, size: Any) -> float:
    """Pooled relative L2 error: √(Σ ‖ô − o‖² / Σ ‖o‖²)."""
    return float(np.sqrt(np.sum(error, dtype=np.float64) / np.sum(size, dtype=np.float64)))


def strategy_error(queries: Queries, strategy: retrieval.Strategy, *, seed: int = 0) -> dict[str, Any]:
    """Relative L2 error of a strategy with `Flat`, pooled over queries, heads and draws."""
    recorded, error, count = queries.recorded, 0.0, len(queries.recorded.ids)
    draws = 1 if isinstance(strategy, retrieval.TopK) else DRAWS
    N, H = recorded.queries.shape[2:]
    T = len(queries.backs)
    lengths = count - jnp.asarray(queries.backs, jnp.int32)
    for i, layer in enumerate(queries.layers):
        cache = recorded.caches[layer]
        K = cache.shape[1]
        query = jnp.asarray(recorded.queries[layer, [-1 - back for back in queries.backs]].reshape(T, K, N // K, H))
        key, value = (rows_of(x[0], cache.dtype) for x in (cache.key, cache.value))
        for draw in range(draws):
            rng = jax.random.fold_in(jax.random.key(seed), layer * DRAWS + draw)
            for k in range(K):
                index = strategy.build(key[k, :count], jax.random.fold_in(rng, k))
                found = np.asarray(_attend(strategy, query[:, k], key[k], value[k], index, lengths))
                dense = queries.outputs[i].reshape(T, K, N // K, H)[:, k]
                error += np.sum((found - dense) ** 2, dtype=np.float64)
    return {"attention_error": relative(error / draws, queries.outputs**2), "draws": draws}


@functools.partial(jax.jit, static_argnums=0)
def _attend(strategy, query, key, value, index, lengths):
    one = lambda x: strategy.attend(x[0], key, value, index, length=x[1]).output
    return jax.lax.map(one, (query, lengths))


class Certified:
    """Certified attention on the queries, for any ε."""

    def __init__(self, queries: Queries, *, window: int, sinks: int, delta: float, seed: int = 0):
        self.queries, self.seed = queries, seed
        self.config = certjax.Config(delta=delta, window=window, sinks=sinks, always_sample=True)
        self._seen: dict[float, dict[str, float]] = {}

    def row(self, epsilon: float) -> dict[str, float]:
        """Error, mean keys and bytes a query head, share of exact heads."""
        if epsilon not in self._seen:
            config = dataclasses.replace(self.config, epsilon=np.float32(epsilon))
            facts, error = [], 0.0
            for i, (_, query, cache, dense) in enumerate(self.queries.each()):
                rng = jax.random.fold_in(jax.random.key(self.seed), i)
                output, certificate = _certified(query, cache, rng, config)
                error += np.sum((np.asarray(output) - dense) ** 2, dtype=np.float64)
                facts.append([np.mean(x) for x in (certificate.keys_read, certificate.bytes_read, certificate.exact)])
            keys, read, exact = np.mean(facts, 0)
            self._seen[epsilon] = {
                "epsilon": epsilon,
                "attention_error": relative(error, self.queries.outputs**2),
                "keys": float(keys),
                "bytes": float(read),
                "exact": float(exact),
            }
        return self._seen[epsilon]

    def within(self, what: Literal["keys", "bytes"], limit: float) -> dict[str, float] | None:
        """The row of the smallest ε whose mean keys or bytes stay within a limit; None where no ε's do."""
        low, high = EPSILONS
        if self.row(high)[what] > limit:
            return None
        if self.row(low)[what] <= limit:
            return self.row(low)
        for _ in range(_BISECTIONS):
            middle = round(float(np.sqrt(low * high)), 4)
            low, high = (low, middle) if self.row(middle)[what] <= limit else (middle, high)
        return self.row(high)


@jax.jit
def _certified(query, cache, rng, config):
    result = certjax.decode_attention(query, cache, rng=rng, config=config)
    return result.output[0, 0], result.certificate


def flat_bytes(n: int, budget: int, *, head_dim: int, group: int, item: int, window: int, sinks: int) -> float:
    """Bytes that SoftmaxLift with `Flat` has to read a query head, at least.

    The keys and −ln u of the pool and both rows of the exact tokens, shared by the heads of a group, and the values of
    k keys. Keys are counted in the cache's own dtype, though `Flat` here keeps float32.
    """
    exact = min(n, window + sinks)
    shared = (n - exact) * (item * head_dim + 4) + exact * 2 * item * head_dim
    return shared / group + min(budget, n - exact) * item * head_dim
