"""Problems for the tests of the methods: a random one, and one whose scores are chosen by hand."""

import functools

import jax.numpy as jnp
import numpy as np

from certjax.eval.methods import Problem

G = 2


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


def one_hot_problem(scores, window=1, **fields):
    """A problem whose first query channel gives key i the score scores[i]; value i is the unit vector i, so that the
    output shows what was read.
    """
    scores = np.asarray(scores, np.float32)
    n = len(scores)
    keys = np.zeros((n, max(n, 2)), np.float32)
    keys[:, 0] = scores
    return Problem(keys=jnp.asarray(keys), values=jnp.eye(n, max(n, 2)), window=window, **fields)


def read_by(method, problem, query, budget, index=None, rng=None):
    """Indices read by each query head: where the output over unit vectors is not zero."""
    import jax

    rng = jax.random.key(0) if rng is None else rng
    index = method.prepare(problem, rng) if index is None else index
    output = method.attend(problem, index, jnp.asarray(query, jnp.float32), budget, rng).output
    return [np.flatnonzero(row).tolist() for row in np.asarray(output)]
