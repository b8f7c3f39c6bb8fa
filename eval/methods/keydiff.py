"""KeyDiff: keeps the keys that are least similar to the mean key. No query is looked at."""

import jax.numpy as jnp

from certjax.eval.methods import knorm
from certjax.eval.methods.protocol import Method, Problem


def prepare(problem: Problem, rng):
    """−cosine of the key and the mean of the normalised keys, float32 [1, n]."""
    keys = problem.keys.astype(jnp.float32)
    unit = keys / jnp.maximum(jnp.sqrt((keys * keys).sum(-1, keepdims=True)), 1e-30)
    mean = unit.mean(0, keepdims=True)
    return -(unit * mean).sum(-1)[None] / jnp.maximum(jnp.sqrt((mean * mean).sum()), 1e-30)


METHOD = Method("keydiff", "KeyDiff", "2504.15364", "eviction", prepare, knorm.attend)
