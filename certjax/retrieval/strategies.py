"""The strategies that ask one oracle one question: SoftmaxLift, TopK, TopKSampling.

Source: "Attention via Black-Box Vector Search" (arXiv 2610.10135).
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from certjax.retrieval import priority
from certjax.retrieval.index import Index
from certjax.retrieval.strategy import Strategy, ask


class PriorityStrategy(Strategy):
    """A strategy that finds the K + 1 keys of largest priority."""

    def _weigh(self, ids: jax.Array, scores: jax.Array, index: Index) -> tuple[jax.Array, jax.Array]:
        exponentials = index.exponentials[jnp.maximum(ids, 0)] if index.exponentials.size else jnp.zeros_like(scores)
        return priority.weigh(scores, exponentials, ids >= 0, index.exponentials.size)


@dataclasses.dataclass(frozen=True)
class SoftmaxLift(PriorityStrategy):
    """Priority sampling by one query: keys are indexed as (x_i, −ln u_i / scale), the query is (q, 1), so the oracle's
    order is that of ln w_i − ln u_i and its top K + 1 are the sample and its threshold (priority.py).

    What it promises, with an exact oracle: numerator and denominator are unbiased over the draw of u, and the error is
    below R √6 / (√(K − 1) − √6) with probability 2/3, whatever n is. What it does not: a bound for the call that was
    made, which `certjax.decode_attention` returns; a small probability of failure; anything over the queries of one
    index together, since they share u, or for queries that depend on earlier outputs; anything with an oracle that
    misses keys.

    Attributes:
      budget: k = K + 1, keys requested for each query.
    """

    budget: int = 128

    def __post_init__(self):
        super().__post_init__()
        if self.budget < 2:
            raise ValueError(
                f"budget must be at least 2, as one key is the threshold and has no weight: got {self.budget}"
            )

    def _count(self) -> int:
        return self.budget

    def _lift(self, points: np.ndarray, exponentials: np.ndarray, scale: float) -> np.ndarray:
        return np.concatenate([points, (exponentials / np.float32(scale))[:, None]], -1)

    def _lift_queries(self, query: jax.Array) -> jax.Array:
        return jnp.pad(query.astype(jnp.float32), ((0, 0), (0, 1)), constant_values=1)


@dataclasses.dataclass(frozen=True)
class TopK(Strategy):
    """Attention over the k keys with the largest scores, as if there were no others.

    It promises nothing: the mass that is left out is unknown and biases every output towards the retrieved keys, where
    `certjax.decode_attention` bounds its error or says that it could not.

    Attributes:
      budget: k.
    """

    budget: int = 128

    def _count(self) -> int:
        return self.budget

    def _weigh(self, ids: jax.Array, scores: jax.Array, index: Index) -> tuple[jax.Array, jax.Array]:
        del ids, index
        return scores, jnp.full(scores.shape[:1], -jnp.inf)


@dataclasses.dataclass(frozen=True)
class TopKSampling(Strategy):
    """The k' = ⌊k / 2⌋ keys with the largest scores, and k − k' uniform ones of the rest, each counted
    (n − k') / (k − k') times.

    Numerator and denominator are unbiased over the draw, with any oracle. No variance is promised, since one heavy key
    of the rest may carry any share of it, and no bound comes with a call, unlike with `certjax.decode_attention`. The
    draw is made once for an index: queries share it.

    Attributes:
      budget: k.
    """

    budget: int = 128

    def _count(self) -> int:
        return self.budget

    def _order(self, exponentials: jax.Array) -> jax.Array:
        # At most k' of the first k are among the top, so these suffice.
        return jax.lax.top_k(exponentials, min(self.budget, exponentials.size))[1].astype(jnp.int32)

    def _retrieve(self, query: jax.Array, index: Index) -> tuple[jax.Array, ...]:
        assert index.order is not None
        top, requested, _, failed = ask(index, self._lift_queries(query), self.budget // 2)
        taken = (index.order[None, :, None] == top[:, None, :]).any(-1)  # [G, budget]
        place = jax.lax.top_k((~taken).astype(jnp.int32), min(self.budget - top.shape[1], taken.shape[1]))[1]
        rest = jnp.where(jnp.take_along_axis(taken, place, 1), -1, index.order[place])
        ids = jnp.concatenate([top, rest], 1)
        return ids, requested, (rest >= 0).sum(-1).astype(jnp.int32), failed

    def _weigh(self, ids: jax.Array, scores: jax.Array, index: Index) -> tuple[jax.Array, jax.Array]:
        half = self.budget // 2
        found = (ids[:, :half] >= 0).sum(-1, keepdims=True)
        drawn = (ids[:, half:] >= 0).sum(-1, keepdims=True)
        log_factor = jnp.log((index.exponentials.size - found) / jnp.maximum(drawn, 1))
        log_weights = jnp.concatenate([scores[:, :half], scores[:, half:] + log_factor.astype(jnp.float32)], 1)
        return log_weights, jnp.full(scores.shape[:1], -jnp.inf)
