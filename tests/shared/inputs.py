"""Keys, values and queries for the tests, seeded: float32 [1, T, K, H], [1, T, K, H], [1, T, N, H]."""

import jax.numpy as jnp
import numpy as np


def _gaussian(rng, shape):
    return rng.normal(size=shape)


def _offset(rng, shape):
    return rng.normal(size=shape) + 6 * rng.normal(size=(1, 1, *shape[2:]))


def _outlier_channels(rng, shape):
    x = rng.normal(size=shape)
    x[..., ::7] *= 40
    return x


def _equal(rng, shape):
    return np.broadcast_to(rng.normal(size=(1, 1, *shape[2:])), shape).copy()


def _duplicates(rng, shape):
    x = rng.normal(size=shape)
    return x[:, rng.integers(0, 5, shape[1])]


def _spikes(rng, shape):
    x = 0.1 * rng.normal(size=shape)
    x[:, :: max(shape[1] // 5, 1)] *= 300
    return x


def _tiny(rng, shape):
    return 1e-6 * rng.normal(size=shape)


KEYS = {
    "gaussian": _gaussian,
    "offset": _offset,
    "outlier_channels": _outlier_channels,
    "equal": _equal,
    "duplicates": _duplicates,
    "spikes": _spikes,
    "tiny": _tiny,
}


def draw(family: str, *, seed: int, tokens: int, kv_heads: int, groups: int, head_dim: int, batch: int = 1):
    """(key, value, query) of one family of keys; values are normal around a common mean."""
    rng = np.random.default_rng(seed)
    shape = (batch, tokens, kv_heads, head_dim)
    key = KEYS[family](rng, shape)
    value = rng.normal(size=shape) + 0.5 * rng.normal(size=(1, 1, kv_heads, head_dim))
    query = rng.normal(size=(batch, tokens, kv_heads * groups, head_dim))
    return tuple(jnp.asarray(x, jnp.float32) for x in (key, value, query))
