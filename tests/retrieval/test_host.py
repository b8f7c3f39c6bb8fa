"""Oracles outside JAX: errors come back, released ones are refused, a program on one CPU does not wait for itself."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certjax import retrieval
from certjax.retrieval import host

ONE_CPU = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import jax, jax.numpy as jnp
from certjax import retrieval

keys = jax.random.normal(jax.random.key(0), (1 << 17, 32))
strategy = retrieval.AdaptiveBuckets(15, 2, window=16)
index = strategy.build(keys, jax.random.key(1))

@jax.jit
def loop(keys):
    def step(i, x):
        # Large operands that were computed just before, by the thread that makes the call.
        return strategy.attend(x, keys + x[:1], keys, index).output
    return jax.lax.fori_loop(0, 10, step, jnp.ones((2, 32)))

print(loop(keys).shape)
"""


class Echo:
    def retrieve(self, queries, count):
        if not np.isfinite(queries).all():
            raise ValueError("queries must be finite")
        G = len(queries)
        return np.full((G, count), 7), np.arange(G), np.zeros(G), np.ones(G, bool)


def test_results_and_errors_come_back():
    handle = host.register(Echo())
    ask = jax.jit(lambda h, q: host.retrieve(h, q, 4))
    ids, requested, _, failed = ask(handle, jnp.ones((3, 2)))
    np.testing.assert_array_equal(ids, np.full((3, 4), 7))
    np.testing.assert_array_equal(requested, [0, 1, 2])
    assert failed.all()
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="queries must be finite"):
        jax.block_until_ready(ask(handle, jnp.full((3, 2), jnp.nan)))
    other = host.register(Echo())
    assert int(other) != int(handle)
    host.release(handle)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"was released: build it again"):
        jax.block_until_ready(ask(handle, jnp.ones((3, 2))))
    jax.block_until_ready(ask(other, jnp.ones((3, 2))))
    host.release(other)


def test_a_new_index_needs_no_new_program():
    strategy = retrieval.AdaptiveBuckets(7, 1, window=4)
    traces = []

    @jax.jit
    def step(index, keys):
        traces.append(None)
        return strategy.attend(keys[:2], keys, keys, index).output

    outputs = []
    for seed in range(3):
        keys = jax.random.normal(jax.random.key(seed), (60, 4))
        index = strategy.build(keys, jax.random.key(0))
        outputs.append(np.asarray(step(index, keys)))
        retrieval.release(index)
    assert len(traces) == 1
    assert not np.array_equal(outputs[0], outputs[1])


@pytest.mark.slow
def test_one_cpu_does_not_wait_for_itself():
    done = subprocess.run([sys.executable, "-c", ONE_CPU], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "(2, 32)\n", done.stderr
