"""`certjax eval error`: how wrong every method is when it reads as much as certified attention does.

Protocol. Problems are kv heads of layers that lie evenly over a model that has read a text; the query is the newest
position's, and what methods may know of the past are the queries of the positions before it. The newest 64 keys are
exact for everyone. The certified op sets the measure for each ε: rivals get, on average over the problems, at most 1.1
times the keys that it reads a query head (heads that it computes exactly included), or at most the bytes that it
reads (metadata and index included). Methods without a key budget have their knob set by bisection. Errors are
‖ô − o‖ / M against dense attention in float32 over the same cache, M² = Σ a_i ‖v_i‖².
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
_BISECTIONS = 9

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
                layer=jnp.int32(layer), layers=jnp.int32(L), scale=H**-0.5, window=WINDOW,
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

    def __init__(self, method: Method, problems: Problems):
        self.method, self.problems = method, problems
        self.rngs = jax.random.split(jax.random.key(0), len(problems.layers))
        self.indexes = _over(method.prepare, method.traceable)(problems.problem, self.rngs)
        self._attend = _over(method.attend, method.traceable)
        self._seen: dict[float, Outcome] = {}

    def outcome(self, budget: float, seed: int = 0) -> Outcome:
        """Of all problems: output [P, G, H], keys_read and bytes_read [P, G]."""
        p, count = self.problems, len(self.problems.layers)
        if seed == 0 and budget in self._seen:
            return self._seen[budget]
        rngs = jax.vmap(lambda rng: jax.random.fold_in(rng, seed))(self.rngs)
        number = np.float32(budget) if self.method.knob else np.int32(budget)
        found = self._attend(p.problem, self.indexes, p.query, np.full(count, number), rngs)
        if seed == 0:
            self._seen[budget] = found
        return found

    def budget_for(self, match: Match, limit: float) -> float | None:
        """The largest budget, or knob nearest to its end of many keys, whose mean cost stays within the limit.

        None where even the smallest one exceeds it.
        """
        n, _ = self.problems.problem.keys.shape[1:]
        cost = lambda budget: float(getattr(self.outcome(budget), f"{match}_read").mean())
        if self.method.knob:
            few, many, place = self.method.knob.fewest, self.method.knob.most, lambda x: x
        else:
            few, many = float(min(WINDOW + protocol.SPARE, n)), float(n)
            place = lambda x: float(int(x))
        if cost(few) > limit:
            return None
        if self.method.budget == "hard" and match == "keys" and cost(place(min(limit, many))) <= limit:
            return place(min(limit, many))
        for _ in range(_BISECTIONS):
            # Costs range over decades: the middle of the logarithms, where there are any.
            middle = place(np.sqrt(few * many) if few > 0 and many > 0 else (few + many) / 2)
            if middle in (few, many):
                break
            few, many = (middle, many) if cost(middle) <= limit else (few, middle)
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
    """Errors and costs of a method with a budget, over problems, heads and (where it draws) seeds."""
    seeds = range(SEEDS if measured.method.family in ("sampling", "certified") else 1)
    outcomes = [measured.outcome(budget, seed) for seed in seeds]
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
