"""Oracles that live outside JAX, reached from compiled programs.

A program holds the number of an oracle, an int32 that is data like any other: a new index needs no new program. The
call gets the operands' own memory and writes the results in place (`jax.experimental.buffer_callback`). It never
enters JAX, so it cannot wait for the thread that runs it: `jax.pure_callback` makes JAX arrays of its operands, which
on a CPU with few threads may wait for itself. CPU only.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.buffer_callback import buffer_callback

Found = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Retriever(Protocol):
    """What lives outside: indexes, and what is needed to ask them."""

    def retrieve(self, queries: np.ndarray, count: int) -> Found:
        """See `retrieve`."""
        ...

    def append(self, points: np.ndarray, exponentials: np.ndarray) -> None:
        """Adds points [m, D] with −ln u [m]."""
        ...


_table: dict[int, Retriever] = {}
_numbers = itertools.count()


def register(retriever: Retriever) -> jax.Array:
    """The number by which programs reach `retriever.retrieve`: int32 []. It is kept until `release`."""
    number = next(_numbers)
    _table[number] = retriever
    return jnp.int32(number)


def registered(handle: jax.Array | np.ndarray) -> Retriever:
    """What `register` was given.

    Raises:
      ValueError: it was released.
    """
    try:
        return _table[int(handle)]
    except KeyError:
        raise ValueError(f"index {int(handle)} was released: build it again") from None


def release(handle: jax.Array) -> None:
    """Forgets an oracle; programs that ask for it afterwards fail."""
    _table.pop(int(handle), None)


def retrieve(handle: jax.Array, queries: jax.Array, count: int) -> tuple[jax.Array, ...]:
    """`registered(handle).retrieve(queries, count)`, inside or outside a compiled program.

    Args:
      handle: from `register`.
      queries: float32 [G, D].
      count: keys wanted for each.

    Returns:
      ids int32 [G, count], −1 where there is none; keys asked of oracles, keys read without one, both int32 [G];
      whether the retrieval failed, bool [G].
    """
    G = queries.shape[0]
    vector = jax.ShapeDtypeStruct((G,), jnp.int32)
    shapes = (
        jax.ShapeDtypeStruct((G, count), jnp.int32),
        vector,
        vector,
        jax.ShapeDtypeStruct((G,), jnp.bool_),
    )
    return buffer_callback(_callback(count), shapes, vmap_method="sequential")(handle, queries)


@functools.cache
def _callback(count: int) -> Callable:
    def call(context, out, handle, queries):
        del context
        # A copy: the memory is XLA's, and an oracle may keep what it is given.
        found = registered(np.asarray(handle)).retrieve(np.asarray(queries).copy(), count)
        for buffer, result in zip(out, found, strict=True):
            np.asarray(buffer)[...] = result

    return call
