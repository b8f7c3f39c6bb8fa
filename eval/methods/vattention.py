"""vAttention: the top keys exactly, and a uniform sample of the rest, sized by a normal bound on the denominator.

    b = (z_{1−δ} σ̂ n_r / (ε D̂))², between the base sample and what there is;   weight n_r / b.

σ̂ is the standard deviation of exp(s) in the base sample, D̂ the denominator estimated with it. Constants ε = δ = 0.05.
The paper takes fixed shares of the context for top keys and base sample. Under a key budget of B beside window and
sinks the top keys are B / 2 (an oracle, whose search is free), the base sample at least 2 and B / 8, and b ends at what
is left. The base sample is the first part of the sample, and the heads of a group draw the same keys.

`FIXED` samples without replacement from the keys that are not read exactly. `AS_IS` follows the published code: the
range includes the top keys, so their spread enters σ̂ and they count twice in D̂; draws are with replacement and
duplicates collapse, while the weight stays n_r / b, so the sampled mass is too small by the share of the duplicates.
"""

import functools

import jax
import jax.numpy as jnp

from certjax.eval.methods.protocol import (
    Method,
    Outcome,
    Problem,
    attend_to,
    beyond_window,
    newest,
    nothing,
    oldest,
    scores,
    sink_count,
)
from certjax.eval.methods.selection import top

SINKS = 128
EPSILON = DELTA = 0.05


def attend(problem: Problem, index, query, budget, rng, *, as_is: bool) -> Outcome:
    """Sinks (128, at most a quarter of what the window leaves), window, top keys, and the sample.

    Bytes: rows read; the sample's own search costs none.
    """
    n, _ = problem.shape
    score = scores(problem, query)
    sinks = sink_count(problem, budget, SINKS)
    static = newest(problem) | oldest(problem, sinks)
    room = jnp.minimum(beyond_window(problem, budget) - sinks, (~static).sum())
    best = top(score, room // 2, ~static)
    exact = best | static
    left = room - room // 2
    pool = jnp.broadcast_to(~static if as_is else ~exact, score.shape)
    size = pool.sum(-1, keepdims=True)
    turn = (_draws_with_replacement if as_is else _draws_without)(rng, pool, n)
    base = jnp.minimum(jnp.maximum(2, left // 4), left)
    weight = jnp.exp(score - jnp.where(exact, score, -jnp.inf).max(-1, keepdims=True))
    wanted = sample_size(weight, exact, pool & (turn < base), size)
    count = jnp.minimum(jnp.clip(wanted, base, left), size)
    sample = pool & (turn < count)
    log_weight = jnp.log(size.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32))
    return attend_to(
        problem, query, exact | sample, log_weight=jnp.where(exact, 0, jnp.maximum(log_weight, 0)), score=score
    )


def sample_size(weight, exact, base, size):
    """B of the module, int32 [G, 1], from the weights of a base sample of a pool of `size` keys."""
    count = jnp.maximum(base.sum(-1, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.where(base, weight, 0).sum(-1, keepdims=True) / count
    variance = jnp.where(base, (weight - mean) ** 2, 0).sum(-1, keepdims=True) / jnp.maximum(count - 1, 1)
    total = jnp.where(exact, weight, 0).sum(-1, keepdims=True) + size.astype(jnp.float32) * mean
    z = jax.scipy.stats.norm.ppf(jnp.float32(1 - DELTA))
    b = (z * jnp.sqrt(variance) * size.astype(jnp.float32) / (EPSILON * total)) ** 2
    return jnp.ceil(jnp.minimum(b, 1e9)).astype(jnp.int32)


def _draws_without(rng, pool, n):
    """Place of every key in a random order of the pool, int32 [G, n]; the order is the same for all heads."""
    order = jax.random.permutation(rng, n)
    return jnp.zeros_like(pool, jnp.int32).at[:, order].set(jnp.cumsum(pool[:, order], -1, dtype=jnp.int32) - 1)


def _draws_with_replacement(rng, pool, n):
    """First of n draws with replacement that hits a key, int32 [1, n]; n where none does."""
    places = jnp.cumsum(pool[0], dtype=jnp.int32) - 1
    drawn = jax.random.randint(rng, (n,), 0, jnp.maximum(pool[0].sum(), 1))
    first = jnp.full(n, n, jnp.int32).at[drawn].min(jnp.arange(n, dtype=jnp.int32))
    return first[jnp.maximum(places, 0)][None]


FIXED = Method(
    "vattention_fixed",
    "vAttention, sampling corrected",
    "2510.05688",
    "sampling",
    nothing,
    functools.partial(attend, as_is=False),
)
AS_IS = Method(
    "vattention_asis",
    "vAttention, as published",
    "2510.05688",
    "sampling",
    nothing,
    functools.partial(attend, as_is=True),
)
