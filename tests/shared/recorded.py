"""Recorded inputs without a model: peaked attention over random keys."""

import jax.numpy as jnp
import numpy as np

import certjax
from certjax.eval.inputs import Recorded

N_TOKENS, PAST, KV_HEADS, GROUP, HEAD_DIM = 512, 12, 2, 2, 32


def recorded(n=N_TOKENS, layers=2, seed=0) -> Recorded:
    rng = np.random.default_rng(seed)
    caches, queries = [], []
    for _ in range(layers):
        key, value = rng.standard_normal((2, 1, n, KV_HEADS, HEAD_DIM), np.float32)
        cache = certjax.init_cache(batch=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity=n + 64, dtype=jnp.bfloat16)
        caches.append(certjax.prefill(cache, key, value + 1))  # outputs that are not small beside M
        queries.append(2.5 * rng.standard_normal((PAST, KV_HEADS * GROUP, HEAD_DIM), np.float32))
    return Recorded(tuple(caches), np.stack(queries), list(range(n)))


def rotary(n=N_TOKENS):
    angle = np.arange(n + 1)[:, None] * 0.3 ** np.arange(HEAD_DIM // 2)
    return jnp.cos(angle).astype(jnp.float32), jnp.sin(angle).astype(jnp.float32)
