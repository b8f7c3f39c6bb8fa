"""`certjax eval error`: how wrong every method is when it reads as much as certified attention does.

Protocol. Problems are kv heads of layers that lie evenly over a model that has read a text; the query is the newest
position's, and what methods may know of the past are the queries of the positions before it. The newest 64 keys and the
oldest 4 are exact for everyone. The certified op sets the measure for each ε: rivals get, on average over the problems,
at most 1.1 times the keys that it reads a query head (heads that it computes exactly included), or at most the bytes
that it reads (metadata and index included); budgets and knobs are set by bisection on the mean cost. The certified op
samples wherever a level certifies (`always_sample`), with δ = 1e-3 a call and without a hint; as it decodes by default,
its cost model reads many heads of short contexts whole. The paper's bounds run with the same ε and δ, and are matched
to nothing, nor is dense attention. Searches that oracles and vAttention do for their top keys cost nothing here. Errors
are ‖ô − o‖ / M against dense attention in float32 over the same cache, M² = Σ a_i ‖v_i‖².
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from certjax.cache import from_storage
from certjax.eval.inputs import Recorded
from certjax.eval.methods import protocol
from certjax.eval.methods.protocol import Method, Outcome, Problem

KEYS_RATIO = 1.1
SEEDS = 4  # of methods that draw
WINDOW = 64
SINKS = 4
_BISECTIONS = 16
_CLOSE = 0.99  # of a limit: no need to look further

Match = Literal["keys", "bytes"]


@dataclasses.dataclass(frozen=True)
class Problems:
    """P problems of one size, stacked.

    Attributes:
      problem: every array with a leading axis P.
      query: float32 [P, G, H].
      output: dense attention, float32 [P, G, H].
      scale: M, float32 [P, G].
      layers: layer of each, [P].
    """

    problem: Problem
    query: jax.Array
    output: jax.Array
    scale: jax.Array
    layers: np.ndarray


def problems_of(recorded: Recorded, layers: Sequence[int], rotary: tuple[jax.Array, jax.Array]) -> Problems:
    """The kv heads of some layers.

    Args:
      recorded: attention inputs.
      layers: which.
      rotary: cos and sin [P, H / 2] of positions 0 … n.
    """
    parts = []
    L, T, N, H = recorded.queries.shape
    n = len(recorded.ids)
    for layer in layers:
        cache = recorded.caches[layer]
        K = cache.shape[1]
        past = recorded.queries[layer, :-1].reshape(T - 1, K, N // K, H)
        for k in range(K):
            key, value = (rows_of(x[0, k, :n], cache.dtype) for x in (cache.key, cache.value))
            problem = Problem(
                key, value, jnp.asarray(past[:, k]), jnp.arange(n - T, n - 1, dtype=jnp.int32),
                layer=jnp.int32(layer), layers=jnp.int32(L), scale=H**-0.5, sinks=SINKS, window=WINDOW,
            )  # fmt: skip
            query = jnp.asarray(recorded.queries[layer, -1].reshape(K, N // K, H)[k])
            parts.append((problem, query, *_dense(problem, query)))
    problem, query, output, scale = jax.tree.map(lambda *x: jnp.stack(x), *parts)
    cos, sin = (jnp.broadcast_to(x, (len(parts), *x.shape)) for x in rotary)
    problem = dataclasses.replace(problem, cos=cos, sin=sin)
    return Problems(problem, query, output, scale, np.repeat(layers, len(parts) // len(layers)))


def rows_of(stored: jax.Array, dtype: str) -> jax.Array:
    """Keys or values as they are, from how a `KVCache` stores them."""
    return jax.lax.bitcast_convert_type(stored, jnp.bfloat16) if dtype == "bfloat16" else from_storage(stored, dtype)


@jax.jit
def _dense(problem: Problem, query: jax.Array) -> tuple[jax.Array, jax.Array]:
    weight = jax.nn.softmax(protocol.scores(problem, query), axis=-1)
    value = problem.values.astype(jnp.float32)
    with jax.default_matmul_precision("highest"):
        return weight @ value, jnp.sqrt(weight @ (value * value).sum(-1))


class Measured:
    """A method on problems: indexes are made once, then it answers for any budget and seed."""

    def __init__(self, method: Method, problems: Problems, seed: int = 0):
        for p in range(len(problems.layers)):
            protocol.check(method, jax.tree.map(operator.itemgetter(p), problems.problem))
        self.method, self.problems = method, problems
        self._key = jax.random.key(seed)
        self._prepare = _over(method.prepare, method.traceable)
        self._attend = _over(method.attend, method.traceable)
        self._indexes: dict[int, Any] = {}
        self._seen: dict[tuple[float, int], Outcome] = {}

    def _index(self, draw: int, rngs: jax.Array) -> Any:
        # Methods that sample may draw in their index: another one for every draw then.
        draw = draw if self.method.family == "sampling" and self.method.prepare is not protocol.nothing else 0
        if draw not in self._indexes:
            self._indexes[draw] = self._prepare(self.problems.problem, rngs)
        return self._indexes[draw]

    def outcome(self, budget: float, draw: int = 0) -> Outcome:
        """Of all problems: output [P, G, H], keys_read and bytes_read [P, G]."""
        p, count = self.problems, len(self.problems.layers)
        if (budget, draw) not in self._seen:
            rngs = jax.random.split(jax.random.fold_in(self._key, draw), count)
            number = np.float32(budget) if self.method.knob else np.int32(budget)
            index = self._index(draw, rngs)
            self._seen[budget, draw] = self._attend(p.problem, index, p.query, np.full(count, number), rngs)
        return self._seen[budget, draw]

    def budget_for(self, match: Match, limit: float) -> float | None:
        """The largest budget, or knob nearest to its end of many keys, whose mean cost stays within the limit.

        None where even the smallest one exceeds it.
        """
        n, _ = self.problems.problem.keys.shape[1:]
        cost = lambda budget: float(getattr(self.outcome(budget), f"{match}_read").mean())
        knob = self.method.knob
        few, many = (knob.fewest, knob.most) if knob else (float(min(WINDOW + protocol.SPARE, n)), float(n))
        if cost(few) > limit:
            return None
        if cost(many) <= limit:
            return many
        for step in range(_BISECTIONS):
            if knob and max(few, many) < 1:
                middle = 1 - float(np.sqrt((1 - few) * (1 - many)))  # shares: what counts is what is left out
            elif not knob and match == "keys" and step == 0:
                middle = float(limit)  # just right where a budget is used up
            else:
                middle = float(np.sqrt(few * many))
            middle = middle if knob else float(int(middle))
            if not min(few, many) < middle < max(few, many):
                break
            spent = cost(middle)
            few, many = (middle, many) if spent <= limit else (few, middle)
            if _CLOSE * limit <= spent <= limit:
                break
        return few


def _over(function: Callable[..., Any], traceable: bool) -> Callable[..., Any]:
    """The function on all problems, one after another."""
    if traceable:
        return _compiled(function)

    def one_by_one(*args):
        ones = (jax.tree.map(operator.itemgetter(i), args) for i in range(len(args[-1])))
        return jax.tree.map(lambda *x: jnp.stack(x), *(function(*one) for one in ones))

    return one_by_one


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(lambda *args: jax.lax.map(lambda one: function(*one), args))


def row(measured: Measured, budget: float) -> dict[str, Any]:
    """Errors and costs of a method with a budget, over problems, heads and (where it samples) draws."""
    draws = range(SEEDS if measured.method.family in ("sampling", "certified") else 1)
    outcomes = [measured.outcome(budget, draw) for draw in draws]
    p = measured.problems
    error = np.stack([np.linalg.norm(np.asarray(o.output - p.output), axis=-1) / np.asarray(p.scale) for o in outcomes])
    mean = lambda name: float(np.mean([np.asarray(getattr(o, name)).mean() for o in outcomes]))
    return {
        "method": measured.method.name,
        "title": measured.method.title,
        "family": measured.method.family,
        "budget": budget,
        "heads": int(error[0].size),
        "seeds": len(outcomes),
        "keys": mean("keys_read"),
        "bytes": mean("bytes_read"),
        **{name: float(np.percentile(error, q)) for name, q in (("median", 50), ("p90", 90), ("p99", 99))},
        "max": float(error.max()),
        "errors": np.sort(error.ravel()).round(6).tolist(),
    }
