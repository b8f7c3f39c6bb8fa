"""What `certjax bench` times: own dense and certified attention, frameworks' calls, and limits of the memory.

The frameworks' calls get plain bfloat16 keys and values and attend all n of them; grouped query heads share their kv
head without repeated keys. Every method is one program, compiled before anything is timed.
"""

import concurrent.futures
import dataclasses
import functools
import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import certjax
from certjax import _ffi
from certjax.eval.bench_inputs import Head
from certjax.types import init_hint

ROW_STRIDE = 16  # the row reference reads n over this many keys
_INLINE_BYTES = 1 << 20  # shorter reads than this a thread are not worth waking one


@dataclasses.dataclass(frozen=True, slots=True)
class Method:
    """One row of the table.

    Attributes:
      name: as printed.
      prepare: from head, step and the previous result of this method on the head (or None) to function and arguments;
        not timed. Calling them is.
      share: bytes that a call must read, relative to all keys and values; None where the result's certificate says.
      attends: whether the result is attention output, to be compared with own dense.
      epsilon: ε, for the certified ones.
    """

    name: str
    prepare: Callable[[Head, int, Any], tuple[Callable[..., Any], tuple[Any, ...]]]
    share: float | None = 1.0
    attends: bool = True
    epsilon: float | None = None


def methods(implementation: str, epsilons: Sequence[float], delta: float) -> list[Method]:
    """All that can run here; own dense is called "dense".

    Args:
      implementation: of the certified step.
      epsilons: a certified method each; ε is traced, so they share a program.
      delta: per call and query head.
    """
    native = _ffi.is_available()[0]
    dense = functools.partial(certjax.dense_decode_attention, implementation="native" if native else "xla")
    # The output alone: XLA drops the certificate, which the baseline has no use for.
    dense_program = jax.jit(lambda query, cache: dense(query, cache).output)
    empty = jax.jit(lambda query, cache: query)
    return [
        Method("empty call", lambda head, t, _: (empty, head.steps[t]), share=0.0, attends=False),
        Method("stream read", _stream, attends=False),
        Method(f"random rows, n / {ROW_STRIDE}", _RandomRows(), share=0.5 / ROW_STRIDE, attends=False),
        Method("dense", lambda head, t, _: (dense_program, head.steps[t])),
        *_certified(implementation, epsilons, delta),
        Method("XLA einsum", lambda head, t, _: (_einsum, (head.steps[t][0], head.key, head.value))),
        Method("jax.nn.dot_product_attention", lambda head, t, _: (_jax_nn, (head.steps[t][0], head.key, head.value))),
        *_torch(),
    ]


def _certified(implementation: str, epsilons: Sequence[float], delta: float) -> list[Method]:
    counter = itertools.count()
    root = jax.random.key(0)

    @jax.jit
    def program(query, cache, rng, hint, config):
        return certjax.decode_attention(query, cache, rng=rng, config=config, hint=hint, implementation=implementation)

    def prepare(config, head, t, previous):
        query, cache = head.steps[t]
        hint = init_hint(batch=1, heads=query.shape[2]) if previous is None else previous.hint
        rng = jax.random.fold_in(root, next(counter))  # fresh for every call
        return program, jax.block_until_ready((query, cache, rng, hint, config))

    return [
        Method(
            f"certified ({implementation})",
            functools.partial(prepare, certjax.Config(jnp.float32(epsilon), jnp.float32(delta))),
            share=None,
            epsilon=epsilon,
        )
        for epsilon in epsilons
    ]


@jax.jit
def _einsum(query, key, value):
    """Query [1, 1, G, H]; key and value [1, 1, n, H]; bfloat16 products, float32 sums and softmax."""
    query = query.astype(key.dtype)
    scores = jnp.einsum("bkgh,bknh->bkgn", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(scores * jnp.float32(query.shape[-1] ** -0.5), axis=-1).astype(value.dtype)
    return jnp.einsum("bkgn,bknh->bkgh", weights, value, preferred_element_type=jnp.float32)


@jax.jit
def _jax_nn(query, key, value):
    # [B, K, n, H] to [B, n, K, H] moves no data where K = 1. The function itself mixes dtypes.
    with jax.numpy_dtype_promotion("standard"):
        return jax.nn.dot_product_attention(query.astype(key.dtype), key.swapaxes(1, 2), value.swapaxes(1, 2))


def _torch() -> list[Method]:
    """Scaled dot product attention and batched matmul of torch, if it can be imported.

    The G query heads stand as G positions of one head: without a mask that is the same, and nothing is repeated.
    """
    # Its threads would keep spinning after a call, and take the CPUs from what is timed next.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return []

    def matmul(query, key, value):
        weights = torch.softmax((query @ key.mT).float() * query.shape[-1] ** -0.5, -1)
        return weights.to(value.dtype) @ value

    def prepare(function, head, t, _):
        tensors = [torch.from_dlpack(x) for x in (head.steps[t][0].astype(jnp.bfloat16), head.key, head.value)]
        return function, tuple(tensors)

    return [
        Method("torch SDPA", functools.partial(prepare, torch.nn.functional.scaled_dot_product_attention)),
        Method("torch batched matmul", functools.partial(prepare, matmul)),
    ]


def task_times() -> dict[str, int]:
    """`certjax._ffi.task_times`; empty without the extension."""
    return _ffi.task_times() if _ffi.is_available()[0] else {}


def output_of(result: Any) -> np.ndarray:
    """The attention output of any method's result, float32 [G, H]."""
    if isinstance(result, certjax.AttentionResult):
        result = result.output
    if not isinstance(result, jax.Array):
        result = result.float().numpy()
    return np.asarray(result, np.float32).reshape(result.shape[-2:])


@functools.cache
def _pool() -> tuple[concurrent.futures.ThreadPoolExecutor, int]:
    threads = _ffi.thread_count()
    return concurrent.futures.ThreadPoolExecutor(threads), threads


def _in_parallel(function: Callable[[slice], Any], count: int, size: int) -> None:
    """Calls function on slices of range(count), on as many threads as XLA has; `size` bytes in all."""
    pool, threads = _pool()
    if size < _INLINE_BYTES * threads:
        threads = 1
    bounds = [count * i // threads for i in range(threads + 1)]
    parts = [slice(*pair) for pair in itertools.pairwise(bounds)]
    if threads == 1:
        function(parts[0])
    else:
        list(pool.map(function, parts))


def read_all(*arrays: np.ndarray) -> None:
    """Reads 16-bit arrays once, with numpy, on as many threads as XLA has."""
    for x in arrays:
        flat = x.reshape(-1)
        _in_parallel(functools.partial(_read_part, flat), len(flat), flat.nbytes)


def _read_part(flat: np.ndarray, part: slice) -> None:
    flat[part].max()  # the fastest pass over memory that numpy has


def _stream(head: Head, t: int, _) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    cache = head.steps[t][1]
    return read_all, (np.asarray(cache.key), np.asarray(cache.value))  # views of the buffers that dense reads


class _RandomRows:
    """Copies a random n / 16 of the keys, in ascending order as the exact reads of the certified step."""

    def __init__(self):
        self._rng = np.random.default_rng(0)

    def __call__(self, head: Head, t: int, _) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        rows = np.asarray(head.steps[t][1].key)[0, 0]
        index = np.sort(self._rng.choice(len(rows), len(rows) // ROW_STRIDE, replace=False))
        return self._read, (rows, index, np.empty((len(index), rows.shape[1]), rows.dtype))

    @staticmethod
    def _read(rows: np.ndarray, index: np.ndarray, out: np.ndarray) -> None:
        copy = lambda part: rows.take(index[part], axis=0, out=out[part], mode="clip")
        _in_parallel(copy, len(index), 16 * out.nbytes)  # a row costs about 16 times its bytes of a stream
