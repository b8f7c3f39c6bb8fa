"""Blocks of neighbouring keys that lie wholly or partly before the window."""

import jax.numpy as jnp

from certjax.eval.methods.protocol import Problem


def block_ids(problem: Problem, length: int):
    """Block of every key, int32 [n]; there are ⌈n / length⌉."""
    return jnp.arange(problem.shape[0], dtype=jnp.int32) // length


def block_sizes(problem: Problem, length: int, allowed):
    """Allowed keys (bool [1, n]) of each block, int32 [C]."""
    ids = block_ids(problem, length)
    return jnp.zeros(block_count(problem, length), jnp.int32).at[ids].add(allowed[0].astype(jnp.int32))


def block_count(problem: Problem, length: int) -> int:
    """⌈n / length⌉."""
    return -(-problem.shape[0] // length)


def in_blocks(problem: Problem, length: int, x, fill):
    """[n, ...] → [C, length, ...], the last block filled up."""
    pad = block_count(problem, length) * length - x.shape[0]
    x = jnp.pad(x, ((0, pad),) + ((0, 0),) * (x.ndim - 1), constant_values=fill)
    return x.reshape(-1, length, *x.shape[1:])
