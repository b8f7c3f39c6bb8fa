"""Products of a few rows with matrices of weights, as a decode step needs them: at the speed the weights are read."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from certjax import _ffi
from certjax._dispatch import dispatch

MAX_ROWS = 32  # beyond, the blocked products of XLA are faster
_DTYPES = ("bfloat16", "float16", "float32")


def project(
    x: jax.Array, weights: Sequence[jax.Array], *, transposed: bool = False, implementation: str | None = None
) -> tuple[jax.Array, ...]:
    """Returns x @ w for every w of `weights`: float32 arithmetic, the weights widened on the way, never in memory.

    On CPUs XLA makes a product of few rows with 16-bit weights one element at a time, and widening them first would
    read six times the bytes. The extension reads each weight once for all rows. Several weights in one call share its
    overhead and its threads.

    Args:
      x: float32 [..., I].
      weights: bfloat16, float16 or float32 [I, O], row-major; O and dtype may differ from one to the next.
      transposed: they are [O, I] instead, as a table of embeddings is; static.
      implementation: None for the extension where x has at most `MAX_ROWS` rows over all leading axes (those of `vmap`
        included, unless weights are mapped too), on CPUs, where it runs vector instructions; XLA otherwise. "native"
        or "xla" force one.

    Returns:
      float32 [..., O] for each weight. NaN and infinity spread as in any product. The extension sums in a fixed order
      that depends only on I and `transposed`: bit-identical for every ISA level, thread count, number of rows and
      number of weights; |error| ≤ (I / 16 + 41) 2⁻²⁴ Σ |x w| to first order.

    Raises:
      ValueError: a rank, size or dtype is wrong, or the implementation cannot run.

    Differentiable: derivatives are those of XLA's product. Under an automatically partitioned `jit` the extension's
    operands are gathered; call it inside `jax.shard_map` there, or force "xla".
    """
    if jnp.ndim(x) < 1 or x.dtype != jnp.float32:
        raise ValueError(f"x must be float32 [..., I]: got {x.dtype} {jnp.shape(x)}")
    layout = "[O, I]" if transposed else "[I, O]"
    for i, w in enumerate(weights):
        if jnp.ndim(w) != 2 or w.shape[1 if transposed else 0] != x.shape[-1]:
            raise ValueError(f"weights[{i}] must be {layout} with I={x.shape[-1]} as in x: got {jnp.shape(w)}")
        if jnp.dtype(w.dtype).name not in _DTYPES:
            raise ValueError(f"weights[{i}] must be one of {', '.join(_DTYPES)}: got {w.dtype}")
    count = math.prod(x.shape[:-1])
    if implementation is None and (count > MAX_ROWS or not _ffi.is_vectorised()):
        implementation = "xla"

    def xla(x, *weights):
        axis = 1 if transposed else 0
        return tuple(
            jax.lax.dot_general(x, w.astype(jnp.float32), (((x.ndim - 1,), (axis,)), ((), ()))) for w in weights
        )

    def native(rows, *weights):
        return _ffi.project(rows, weights, transposed=transposed)

    chosen = dispatch(implementation, native, xla)
    if chosen is xla or not weights:
        return xla(x, *weights)

    @jax.custom_batching.custom_vmap
    def product(rows, *weights):
        return chosen(rows, *weights)

    @product.def_vmap
    def mapped(size, batched, rows, *weights):
        if any(batched[1:]):
            out = jax.vmap(chosen, in_axes=[0 if b else None for b in batched])(rows, *weights)
        else:  # more rows of the same product
            out = project(rows, weights, transposed=transposed, implementation=implementation)
        return out, (True,) * len(weights)

    differentiable = jax.custom_jvp(product)

    @differentiable.defjvp
    def derivative(primals, tangents):
        return differentiable(*primals), jax.jvp(xla, primals, tangents)[1]

    out = differentiable(x.reshape(count, x.shape[-1]), *weights)
    return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in out)
