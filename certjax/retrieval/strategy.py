"""What every strategy is: a rule that decides which keys to ask an oracle for and how to weight them.

All promise less than `certjax.decode_attention`, which proves a bound on the error of each call it certifies. Here no
call comes with a bound, and what an approximate oracle misses is nowhere counted.

Axis letters: G query heads that share a kv head, S capacity of the cache, H head dim, n keys of the pool. Batch and kv
heads are for `jax.vmap`, or for a loop.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from certjax.retrieval import host, oracles, priority
from certjax.retrieval import index as indexes
from certjax.retrieval.index import Index, RetrievalResult


@dataclasses.dataclass(frozen=True)
class Strategy:
    """What all strategies share. Frozen and hashable: static under `jax.jit`.

    Attributes:
      window: newest tokens that are read exactly when the index is built.
      sinks: oldest tokens that are read exactly.
      scale: factor on q·k before the softmax; None for 1/√H.
    """

    window: int = dataclasses.field(default=1024, kw_only=True)
    sinks: int = dataclasses.field(default=1, kw_only=True)
    scale: float | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self):
        for field in dataclasses.fields(self):
            x = getattr(self, field.name)
            if field.name == "scale":
                if x is not None and not 0 < x < float("inf"):
                    raise ValueError(f"scale must be positive and finite: got {x}")
                continue
            low = 0 if field.name in ("window", "sinks") else 1
            if not (x is None and field.default is None) and not (isinstance(x, int) and x >= low):
                raise ValueError(f"{field.name} must be an integer of at least {low}: got {x!r}")

    def build(
        self,
        keys: jax.Array,
        rng: jax.Array,
        oracle: oracles.Oracle | None = None,
        *,
        length: int | None = None,
        queries: jax.Array | None = None,
    ) -> Index:
        """An index over the keys between sinks and window. Not for use inside `jit`.

        Args:
          keys: [S, H], any float dtype, finite.
          rng: one typed random key; all randomness of the strategy is drawn from it, here.
          oracle: None for `Flat()`.
          length: keys that exist; None for S.
          queries: [m, H], queries that the oracle may be trained on.

        Raises:
          ValueError: a wrong rank, or an oracle that needs queries and gets none.
          ImportError: the oracle's library is missing.
        """
        if keys.ndim != 2:
            raise ValueError(f"keys must be those of one kv head, [S, H]: got shape {keys.shape}")
        stop = max(self.sinks, (keys.shape[0] if length is None else length) - self.window)
        start = min(self.sinks, stop)
        n = stop - start
        exponentials = priority.exponentials(rng, n)
        scale, oracle = self._scale(keys), oracle or oracles.Flat()
        points = self._lift(indexes.as_rows(keys[start:stop]), np.asarray(exponentials), scale)
        train = None if queries is None else indexes.as_rows(queries)
        retriever = self._retriever(points, np.asarray(exponentials), oracle, train, scale)
        return Index(
            points=jnp.asarray(points) if retriever is None else None,
            handle=None if retriever is None else host.register(retriever),
            exponentials=exponentials,
            order=self._order(exponentials),
            rng=rng,
            start=start,
            stop=stop,
        )

    def append(self, index: Index, keys: jax.Array, *, length: int | None = None) -> Index:
        """Moves the tokens that have left the window into the index. An oracle outside JAX is changed in place, so the
        old index must not be used again. Programs compile anew for the new index: append many tokens at a time.

        Args:
          index: of the first tokens of the same keys.
          keys: [S, H].
          length: keys that exist; None for S.

        Raises:
          NotImplementedError: the oracle's index cannot grow.
        """
        stop = (keys.shape[0] if length is None else length) - self.window
        if stop <= index.stop:
            return index
        exponentials = priority.exponentials(index.rng, stop - index.start)
        fresh = np.asarray(exponentials[index.stop - index.start :])
        points = self._lift(indexes.as_rows(keys[index.stop : stop]), fresh, self._scale(keys))
        if index.handle is not None:
            host.registered(index.handle).append(points, fresh)
        return dataclasses.replace(
            index,
            points=None if index.points is None else jnp.concatenate([index.points, points]),
            exponentials=exponentials,
            order=self._order(exponentials),
            stop=stop,
        )

    def attend(
        self,
        query: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        index: Index,
        *,
        length: jax.Array | int | None = None,
    ) -> RetrievalResult:
        """Attention of one decode step. The same inputs and index give the same result.

        Args:
          query: [G, H], heads that share this kv head.
          keys: [S, H], those that the index was built from, and newer ones.
          values: [S, H].
          index: from `build` or `append`.
          length: keys that exist, may be traced; None for S. Keys from `index.stop` on are read exactly.

        Raises:
          ValueError: shapes that do not fit; a `length` that is not traced and below `index.stop`.

        Where a traced `length` is below `index.stop`, pool keys beyond it carry no weight and `failed` is True. Where a
        query is not finite, its row's output is NaN and `failed` is True.

        Rows from `index.stop` to S are all read, those beyond `length` too: keep S near `length`. With `Flat` every
        key of the pool is compared, so keys are saved and time is not.
        """
        if query.ndim != 2 or keys.ndim != 2 or query.shape[1] != keys.shape[1]:
            raise ValueError(f"query must be [G, H] and keys [S, H]: got {query.shape} and {keys.shape}")
        if values.shape[0] != keys.shape[0] or keys.shape[0] < index.stop:
            raise ValueError(
                f"keys and values must have the same number of rows, at least {index.stop} (the index's): got "
                f"{keys.shape} and {values.shape}"
            )
        length = keys.shape[0] if length is None else length
        if not isinstance(length, jax.core.Tracer) and _is_short(index, int(length)):
            raise ValueError(f"length must be at least {index.stop}, up to where keys are indexed: got {length}")
        return _attend(self, query, keys, values, index, jnp.int32(length))

    def _scale(self, keys: jax.Array) -> float:
        return keys.shape[-1] ** -0.5 if self.scale is None else self.scale

    # What a strategy must define, and what it may.

    def _count(self) -> int:
        """Keys that a retrieval returns at most."""
        raise NotImplementedError

    def _weigh(self, ids: jax.Array, scores: jax.Array, index: Index) -> tuple[jax.Array, jax.Array]:
        """Logarithms of the weights of retrieved keys [G, m], −inf for none, and ln τ [G]; `ids` as of `_retrieve`."""
        raise NotImplementedError

    def _retrieve(self, query: jax.Array, index: Index) -> tuple[jax.Array, ...]:
        """Numbers in the pool [G, m], −1 for none; keys requested, keys read directly, failed, each [G]."""
        return ask(index, self._lift_queries(query), self._count())

    def _retriever(
        self,
        points: np.ndarray,
        exponentials: np.ndarray,
        oracle: oracles.Oracle,
        queries: np.ndarray | None,
        scale: float,
    ) -> host.Retriever | None:
        """What answers outside JAX; None for one flat index, which is searched in jnp."""
        del exponentials, scale
        if isinstance(oracle, oracles.Flat):
            return None
        return OneOracle(
            oracle, points, None if queries is None else np.asarray(self._lift_queries(jnp.asarray(queries)))
        )

    def _order(self, exponentials: jax.Array) -> jax.Array | None:
        """The beginning of a random order of the pool, where the strategy samples uniformly."""
        del exponentials
        return None

    def _lift(self, points: np.ndarray, exponentials: np.ndarray, scale: float) -> np.ndarray:
        """The points that are indexed for keys [n, H]."""
        del exponentials, scale
        return points

    def _lift_queries(self, query: jax.Array) -> jax.Array:
        return query.astype(jnp.float32)


class OneOracle:
    """One index as something that `host.retrieve` can call."""

    def __init__(self, oracle: oracles.Oracle, points: np.ndarray, queries: np.ndarray | None):
        self.oracle, self.queries, self.size = oracle, queries, len(points)
        self.searcher = oracle.build(points, queries) if self.size else None

    def retrieve(self, queries: np.ndarray, count: int) -> host.Found:
        """See `host.retrieve`."""
        G = len(queries)
        nothing = np.full((G, count), -1, np.int32)
        ids = nothing if self.searcher is None else self.searcher.search(queries, count)
        requested = np.full(G, min(count, self.size), np.int32)
        return ids, requested, np.zeros(G, np.int32), (ids >= 0).sum(1) < requested

    def append(self, points: np.ndarray, exponentials: np.ndarray) -> None:
        """Adds points that follow the others."""
        del exponentials
        if self.searcher is None:
            self.searcher = self.oracle.build(points, self.queries)
        else:
            self.searcher.append(points)
        self.size += len(points)


def ask(index: Index, queries: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """`host.retrieve`, or the same of a flat index in jnp."""
    G = queries.shape[0]
    none, no = jnp.zeros((G,), jnp.int32), jnp.zeros((G,), bool)
    if not count:
        return jnp.zeros((G, 0), jnp.int32), none, none, no
    if index.handle is not None:
        return host.retrieve(index.handle, queries, count)
    assert index.points is not None
    return oracles.search(index.points, queries, count), none + min(count, index.points.shape[0]), none, no


def finish(
    strategy: Strategy,
    retrieved: tuple[jax.Array, ...],
    query: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    index: Index,
    length: jax.Array,
) -> RetrievalResult:
    """What `Strategy.attend` does with what was retrieved; arguments as there, `retrieved` as of `retrieve`."""
    scale = strategy._scale(keys)
    found, requested, direct, failed = retrieved
    ids = jnp.where(found >= 0, found + index.start, -1)
    scores = indexes.scores(query, keys[jnp.maximum(ids, 0)], scale)
    scores = jnp.where(found >= 0, scores, -jnp.inf)
    log_weights, log_tau = strategy._weigh(found, scores, index)
    log_weights = jnp.where(ids < length, log_weights, -jnp.inf)
    output, log_denominator = indexes.combine(query, keys, values, index, ids, log_weights, length, scale)
    finite = jnp.isfinite(query).all(-1)
    return RetrievalResult(
        output=jnp.where(finite[:, None], output, jnp.nan).astype(query.dtype),
        ids=ids,
        log_weights=log_weights,
        log_threshold=log_tau,
        log_denominator=jnp.where(finite, log_denominator, jnp.nan),
        keys_requested=requested,
        keys_direct=direct,
        keys_used=(log_weights > -jnp.inf).sum(-1).astype(jnp.int32),
        failed=failed | ~finite | _is_short(index, length),
    )


def _is_short(index: Index, length: jax.Array | int) -> jax.Array | bool:
    """Whether the pool holds keys that do not exist yet."""
    return (index.stop > index.start) & (length < index.stop)


def retrieve(strategy: Strategy, query: jax.Array, index: Index) -> tuple[jax.Array, ...]:
    """The first half of `Strategy.attend`: numbers in the pool [G, m], −1 for none; keys requested, keys read directly,
    failed, each [G].
    """
    return strategy._retrieve(query, index)


@functools.partial(jax.jit, static_argnums=0)
def _attend(
    strategy: Strategy, query: jax.Array, keys: jax.Array, values: jax.Array, index: Index, length: jax.Array
) -> RetrievalResult:
    return finish(strategy, retrieve(strategy, query, index), query, keys, values, index, length)
