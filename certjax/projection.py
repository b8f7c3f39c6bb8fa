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

    On CPUs XLA widens 16-bit weights one element at a time, in every product or into a copy that it keeps, and is no
    faster for a few rows than for many. The extension reads each weight once for all rows. Several weights in one call
    share its threads.

    Args:
      x: float32 [..., I].
      weights: bfloat16, float16 or float32 [I, O], row-major; O and dtype may differ from one to the next.
      transposed: they are [O, I] instead, as a table of embeddings is; static.
      implementation: None for the extension where it is faster: on CPUs, where it runs vector instructions, for up to
        `MAX_ROWS` rows over all leading axes (those of `vmap` included, unless weights are mapped too), but for one row
        with float32 weights, which XLA reads as fast. XLA otherwise. "native" or "xla" force one.

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
    widest = all(w.dtype == jnp.float32 for w in weights)
    # A product of one row with float32 weights is the one that XLA does at the speed of memory.
    if implementation is None and ((count == 1 and widest) or count > MAX_ROWS or not _ffi.is_vectorised()):
        implementation = "xla"

    def plain(x, *weights):
        dimensions = (((x.ndim - 1,), (1 if transposed else 0,)), ((), ()))
        return tuple(jax.lax.dot_general(x, w.astype(jnp.float32), dimensions) for w in weights)

    def xla(x, *weights):
        if x.size == 0 or widest:
            return plain(x, *weights)
        # Never true, but XLA cannot know: so it widens the weights when x is there and can reuse the memory, and not
        # all weights of a program at once, or before a loop.
        never = (jax.lax.bitcast_convert_type(x[(0,) * x.ndim], jnp.uint32) | 1) == 0
        return plain(x, *(jnp.where(never, jnp.float32(0), w.astype(jnp.float32)) for w in weights))

    def native(x, *weights):
        out = _ffi.project(x.reshape(count, x.shape[-1]), weights, transposed=transposed)
        return tuple(y.reshape(*x.shape[:-1], y.shape[-1]) for y in out)

    chosen = dispatch(implementation, native, xla)
    if chosen is xla and widest:
        return plain(x, *weights)

    @jax.custom_batching.custom_vmap
    def product(x, *weights):
        return chosen(x, *weights)

    @product.def_vmap
    def mapped(size, batched, x, *weights):
        if any(batched[1:]):
            out = jax.vmap(chosen, in_axes=[0 if b else None for b in batched])(x, *weights)
        else:  # more rows of the same product
            out = project(x, weights, transposed=transposed, implementation=implementation)
        return out, (True,) * len(weights)

    differentiable = jax.custom_jvp(product)

    @differentiable.defjvp
    def derivative(primals, tangents):
        return differentiable(*primals), jax.jvp(plain, primals, tangents)[1]

    return differentiable(x, *weights)
