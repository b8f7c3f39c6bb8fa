"""Caches, tokens and queries for the tests of the extension's calls, and attention in float64."""

import dataclasses
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from certjax import _ffi, quantization
from certjax.cache import from_storage, init_cache
from certjax.types import KVCache

DTYPES = ("bfloat16", "float16", "float32")
LEVELS = _ffi.isa_levels()
BLOCK_FIELDS = ("codes", "code_scale", "code_zero", "residual_ratio", "residual_norm")
ARRAYS = tuple(f.name for f in dataclasses.fields(KVCache) if f.name != "dtype")


def make_cache(rng, *, batch=2, kv_heads=2, head_dim=32, capacity=192, dtype="bfloat16", length=0):
    """A cache with `length` random tokens (no metadata for them) and a calibration that is not the default."""
    cache = init_cache(batch=batch, kv_heads=kv_heads, head_dim=head_dim, capacity=capacity, dtype=dtype)
    shape = (batch, kv_heads, head_dim)

    def fill(x):
        x = np.array(x)
        x[:, :, :length] = stored(rng.standard_normal((*shape[:2], length, head_dim)), dtype)
        return jnp.asarray(x)

    return dataclasses.replace(
        cache,
        key=fill(cache.key),
        value=fill(cache.value),
        channel_weight=jnp.asarray(np.exp(rng.standard_normal(shape)), jnp.float32),
        channel_order=jnp.asarray(rng.permuted(np.broadcast_to(np.arange(head_dim), shape), axis=-1), jnp.int32),
        value_center=jnp.asarray(rng.standard_normal(shape), jnp.float32),
        length=jnp.full((batch,), length, jnp.int32),
    )


def stored(x, dtype):
    """What a cache of this dtype stores, in numpy: each operation of jnp is another program to compile."""
    x = x.astype(np.float32)
    return x.astype(ml_dtypes.bfloat16).view(np.uint16) if dtype == "bfloat16" else x.astype(dtype)


def make_tokens(rng, cache, count, scale=1.0):
    """Keys and values [count, B, K, H] in the storage dtype; channels of very different sizes."""
    B, K, _, H = cache.shape
    sizes = scale * np.exp(rng.standard_normal(H))
    return [
        jnp.asarray(stored(rng.standard_normal((count, B, K, H)) * sizes + offset, cache.dtype))
        for offset in (scale * rng.standard_normal(H), 0)
    ]


def fill(cache, keys, values, active=None, isa=None):
    """Appends all tokens in a compiled loop."""
    active = jnp.ones((cache.shape[0],), bool) if active is None else active

    def body(i, cache):
        return _ffi.append(cache, keys[i], values[i], active, isa=isa)

    return jax.jit(lambda cache: jax.lax.fori_loop(0, keys.shape[0], body, cache))(cache)


def make_query(rng, cache, group):
    B, K, _, H = cache.shape
    return jnp.asarray(rng.standard_normal((B, K, group, H)) / np.sqrt(H), jnp.float32)


def exact(query, cache, span=0):
    """Attention in float64."""
    _B, _K, _S, _H = cache.shape
    query = np.asarray(query, np.float64)
    key, value = (np.asarray(from_storage(x, cache.dtype), np.float64) for x in (cache.key, cache.value))
    out, lse = np.zeros(query.shape), np.full(query.shape[:3], -np.inf)
    for b, n in enumerate(np.asarray(cache.length)):
        first = max(0, n - span) if span else 0
        if n == first:
            continue
        score = np.einsum("kgh,kth->kgt", query[b], key[b, :, first:n])
        top = score.max(-1, keepdims=True)
        weight = np.exp(score - top)
        total = weight.sum(-1)
        out[b] = np.einsum("kgt,kth->kgh", weight, value[b, :, first:n]) / total[..., None]
        lse[b] = top[..., 0] + np.log(total)
    return out, lse


def bf16(bits):
    return np.asarray(quantization.from_bf16_bits(jnp.asarray(bits)), np.float64)


def norm(x):
    return np.linalg.norm(np.asarray(x, np.float64), axis=-1)


def assert_same_bits(a, b, names=ARRAYS):
    for name in names:
        x, y = (np.asarray(getattr(c, name)) for c in (a, b))
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"), err_msg=name)


_AFFINITY = """
import os, sys
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: int(sys.argv[1])])
"""


def on_one_and_two_cpus(script: str) -> list[list[str]]:
    """The words that a script prints on one CPU and on two: XLA takes its threads from them when it starts."""
    outputs = []
    for cpus in (1, 2):
        command = [sys.executable, "-c", _AFFINITY + script, str(cpus)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        assert done.stderr == ""
        outputs.append(done.stdout.split())
    return outputs
