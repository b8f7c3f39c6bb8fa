"""Problems for the tests of the methods: a random one, and hand-made ones whose outputs show what was read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from certjax.eval.methods import Problem

G = 2
# Compiling is most of these tests' time, and this halves it.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


@functools.cache
def compiled(method):
    """The method's (prepare, attend)."""
    return (jit(method.prepare), jit(method.attend)) if method.traceable else (method.prepare, method.attend)


@functools.cache
def example(n, H=16, T=70):
    """A problem with all that a method may need, scores of standard deviation 1.5, and a query [G, H]."""
    rng = np.random.default_rng(5)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    angle = np.arange(n + 32)[:, None] * 100.0 ** -(np.arange(0, H, 2) / H)
    problem = Problem(
        keys=jnp.asarray(draw(n, H), jnp.bfloat16),
        values=jnp.asarray(draw(n, H) + 1, jnp.bfloat16),
        past_queries=jnp.asarray(1.5 * draw(T, G, H)),
        past_positions=jnp.arange(n - T, n, dtype=jnp.int32),
        cos=jnp.asarray(np.cos(angle), jnp.float32),
        sin=jnp.asarray(np.sin(angle), jnp.float32),
        layer=1,
        layers=3,
        scale=H**-0.5,
    )
    return problem, jnp.asarray(1.5 * draw(G, H))


def by_hand(keys, window=1, past=None, positions=None, **fields):
    """A problem of given keys [n] or [n, H] at scale 1, whose value i is the unit vector i; past is [T, G, H]."""
    keys = np.asarray(keys, np.float32)
    keys = keys[:, None] if keys.ndim == 1 else keys
    if past is not None:
        fields |= {"past_queries": jnp.asarray(past, jnp.float32), "past_positions": jnp.asarray(positions, jnp.int32)}
    return Problem(keys=jnp.asarray(keys), values=jnp.eye(len(keys)), window=window, **fields)


def answer(method, problem, query, budget, index=None, seed=0):
    """The outcome of one step; the index is prepared unless it is given."""
    rng = jax.random.key(seed)
    prepare, attend = compiled(method)
    index = prepare(problem, rng) if index is None else index
    return attend(problem, index, jnp.asarray(query, jnp.float32), budget, rng)


def read_by(method, problem, query, budget, index=None, seed=0):
    """Keys that each query head read: where the output over unit vectors is not zero."""
    out = answer(method, problem, query, budget, index, seed)
    keys = [np.flatnonzero(row).tolist() for row in np.asarray(out.output)]
    assert [len(k) for k in keys] == np.asarray(out.keys_read).tolist()
    return keys
