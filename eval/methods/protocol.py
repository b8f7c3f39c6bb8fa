"""What every method gets and gives back, and the one meter of keys and bytes.

A *problem* is one kv head of one layer as it is cached, with what may be known of its past; the group of G query heads
that share it is answered together. A method builds an index once a cache (`prepare`, which sees no query of the step)
and answers decode steps from it (`attend`). All are functions of arrays, so both can be jitted and vmapped.

**Budget**: keys a query head reads in a step, the window and any sinks included. The newest `window` keys are exact for
every method and always read (and the oldest `sinks`), so a budget holds at least `window` + 16 keys or all n. Methods
that read as many keys as they see fit take their own number instead, between those of their `Knob`.

**Bytes**: key and value rows of the keys that are read, in the cache's dtype, plus metadata and index as the method
would read them (each says how). A row read for one head of the group serves all: the group's bytes are split evenly
over its heads, as in `certjax.Certificate`. Writing the index is not counted.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

Family = Literal["oracle", "eviction", "selection", "sampling", "certified"]
BudgetKind = Literal["hard", "layers", "mean", "none"]
SPARE = 16  # keys beside the window that every budget allows: a page, two chunks, the sinks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Problem:
    """One kv head of a decode step, without the query.

    Attributes:
      keys: [n, H] after RoPE as cached, bfloat16, float16 or float32.
      values: [n, H], the same dtype.
      past_queries: float32 [T, G, H] after RoPE, of the last T positions before the step, oldest first, or None.
      past_positions: int32 [T], their positions; query t has seen the keys up to its own.
      cos: float32 [P, H / 2], rotary table of the positions 0 … P − 1 with n < P (halves of the channels turn
        together, as in `certjax.models.llama.rope.rotate`), or None.
      sin: the same.
      layer: index of the layer, from 0.
      layers: number of layers.
      scale: factor on q · k before the softmax, 1/√H in most models (static).
      window: newest keys that are always read (static).
      sinks: oldest keys that are always read, whatever the method's own rule says of sinks (static).
    """

    keys: jax.Array
    values: jax.Array
    past_queries: jax.Array | None = None
    past_positions: jax.Array | None = None
    cos: jax.Array | None = None
    sin: jax.Array | None = None
    layer: Any = 0
    layers: Any = 1
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    window: int = dataclasses.field(default=64, metadata={"static": True})
    sinks: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int]:
        """(n, H)."""
        n, H = self.keys.shape
        return n, H


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What a step gave.

    Attributes:
      output: float32 [G, H].
      keys_read: int32 [G], keys whose value was read, window and sinks included.
      bytes_read: float32 [G], the head's share of the group's bytes.
      log_normalizer: float32 [G], ln of the (estimated) softmax denominator, for merging with keys read elsewhere.
    """

    output: jax.Array
    keys_read: jax.Array
    bytes_read: jax.Array
    log_normalizer: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Knob:
    """The number that a method without a key budget takes in its place.

    Attributes:
      name: what it is.
      fewest: its value at the end where few keys are read.
      most: at the other end.
    """

    name: str
    fewest: float
    most: float


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One line of the registry.

    Attributes:
      name: identifier.
      title: as printed.
      citation: arXiv number, or "" where there is none.
      family: what kind of rule it is.
      prepare: (problem, rng) → index, any pytree.
      attend: (problem, index, query float32 [G, H], budget, rng) → Outcome. The budget is an integer or, with a knob, a
        float; either may be traced.
      budget: how keys_read obeys it: "hard", never more; "layers", in the mean over the layers; "mean", in the mean
        over queries like the past ones; "none", the method has a knob or reads everything.
      knob: what takes the budget's place, where it is "none".
      history: whether `prepare` needs past queries.
      rotary: whether it needs `cos` and `sin`.
      traceable: whether `prepare` and `attend` may be jitted.
    """

    name: str
    title: str
    citation: str
    family: Family
    prepare: Callable[[Problem, jax.Array], Any]
    attend: Callable[[Problem, Any, jax.Array, Any, jax.Array], Outcome]
    budget: BudgetKind = "hard"
    knob: Knob | None = None
    history: bool = False
    rotary: bool = False
    traceable: bool = True


def nothing(problem: Problem, rng: jax.Array) -> tuple[()]:
    """The index of a method that builds none."""
    del problem, rng
    return ()


def check(method: Method, problem: Problem, budget: Any = None) -> None:
    """Refuses what would make a comparison unfair or fail late.

    Raises:
      ValueError: arrays that do not fit, a budget below `window` + 16, history or rotary table missing.
    """
    n, H = problem.shape
    if problem.values.shape != (n, H) or problem.values.dtype != problem.keys.dtype:
        raise ValueError(
            f"values must be {problem.keys.dtype} [{n}, {H}] like keys: got {problem.values.dtype} "
            f"{problem.values.shape}"
        )
    past, at = problem.past_queries, problem.past_positions
    if method.history and (past is None or at is None):
        raise ValueError(f"{method.name} needs past_queries and past_positions: pass those of the prompt's end")
    if past is not None and (past.ndim != 3 or past.shape[2] != H or at is None or at.shape != past.shape[:1]):
        raise ValueError(f"past_queries must be [T, G, H={H}] and past_positions [T]: got {past.shape}")
    if method.rotary and (problem.cos is None or problem.sin is None or problem.cos.shape[0] <= n):
        raise ValueError(f"{method.name} needs cos and sin [P, {H // 2}] with P > {n}: see rope.rotary_tables")
    if method.budget != "none" and budget is not None and budget < min(problem.window + SPARE, n):
        raise ValueError(f"budget must be at least window + {SPARE} = {problem.window + SPARE} keys: got {budget}")


def newest(problem: Problem) -> jax.Array:
    """The window, and the sinks that every method has, bool [1, n]."""
    n, _ = problem.shape
    at = jnp.arange(n)[None]
    return (at >= n - problem.window) | (at < problem.sinks)


def oldest(problem: Problem, count: Any) -> jax.Array:
    """The first `count` keys, bool [1, n]."""
    return jnp.arange(problem.shape[0])[None] < count


def beyond_window(problem: Problem, budget: Any) -> jax.Array:
    """What a budget leaves beside the window and the sinks of every method: keys, int32."""
    return jnp.maximum(jnp.asarray(budget, jnp.int32) - min(problem.window + problem.sinks, problem.shape[0]), 0)


def sink_count(problem: Problem, budget: Any, wanted: int) -> jax.Array:
    """Sinks of a method that wants so many: at most a quarter of what the budget leaves beside the window."""
    return jnp.minimum(wanted, beyond_window(problem, budget) // 4)


def scores(problem: Problem, query: jax.Array) -> jax.Array:
    """Scale · q·k in float32: [..., H] → [..., n]."""
    return jnp.einsum("...h,nh->...n", query, problem.keys.astype(jnp.float32)) * jnp.float32(problem.scale)


def attend_to(
    problem: Problem,
    query: jax.Array,
    read: jax.Array,
    *,
    index_bytes: Any = 0.0,
    log_weight: jax.Array | None = None,
    score: jax.Array | None = None,
) -> Outcome:
    """Softmax attention over the keys that are read, and its cost.

    Args:
      problem: Problem.
      query: float32 [G, H].
      read: bool [1, n] or [G, n]; a head that reads nothing gets zeros.
      index_bytes: metadata and index that the group reads, bytes.
      log_weight: [1, n] or [G, n], added to the scores: −ln of an inclusion probability.
      score: float32 [G, n], where the keys are not the cached ones.
    """
    G, row = query.shape[0], row_bytes(problem)
    read = jnp.broadcast_to(read, (G, problem.shape[0]))
    score = scores(problem, query) if score is None else score
    if log_weight is not None:
        score = score + log_weight
    bytes_read = number(read.any(0)) * (2 * row) + index_bytes
    return Outcome(
        output=softmax(score, read) @ problem.values.astype(jnp.float32),
        keys_read=read.sum(-1).astype(jnp.int32),
        bytes_read=jnp.broadcast_to(bytes_read / G, (G,)).astype(jnp.float32),
        log_normalizer=jax.nn.logsumexp(jnp.where(read, score, -jnp.inf), axis=-1),
    )


def number(mask: jax.Array) -> jax.Array:
    """How many entries are True, float32."""
    return mask.sum().astype(jnp.float32)


def row_bytes(problem: Problem) -> int:
    """Bytes of one key or value."""
    return problem.shape[1] * problem.keys.dtype.itemsize


def softmax(score: jax.Array, read: jax.Array) -> jax.Array:
    """Softmax over the last axis of what is read; zeros where nothing is."""
    score = jnp.where(read, score, -jnp.inf)
    top = score.max(-1, keepdims=True)
    weight = jnp.exp(score - jnp.where(jnp.isfinite(top), top, 0))
    return weight / jnp.maximum(weight.sum(-1, keepdims=True), jnp.float32(1e-37))
