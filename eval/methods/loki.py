"""Loki: approximate scores on the first principal components of the keys.

The components are those of this cache's keys after RoPE, in place of a calibration text: no worse for the method.
"""

import jax.numpy as jnp

from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest
from certjax.eval.methods.selection import top

SHARE = 4  # one component in so many


def prepare(problem: Problem, rng):
    """(components [H, r], keys in them [n, r]), float32; the covariance is centred, the keys are not."""
    keys = problem.keys.astype(jnp.float32)
    centred = keys - keys.mean(0, keepdims=True)
    _, vectors = jnp.linalg.eigh(centred.T @ centred)  # ascending
    components = vectors[:, ::-1][:, : max(keys.shape[1] // SHARE, 1)]
    return components, keys @ components


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window, and for each query head the keys with the largest score on the first H / 4 components.

    Bytes: rows read, and H / 4 numbers a key in the cache's dtype, once for the group (keys are cached rotated, so the
    components are part of them; a row that is read is read whole).
    """
    components, rotated = index
    window = newest(problem)
    best = top((query @ components) @ rotated.T, beyond_window(problem, budget), ~window)
    return attend_to(problem, query, best | window, index_bytes=rotated.size * problem.keys.dtype.itemsize)


METHOD = Method("loki", "Loki", "2406.02542", "selection", prepare, attend)
