"""Certified attention in an NNX module of one's own that keeps its own cache: three lines, in `__call__`.

Run it as `python examples/own_module.py`.
"""

import jax
import jax.numpy as jnp
from flax import nnx

import certjax

BATCH, HEADS, KV_HEADS, HEAD_DIM, FEATURES = 2, 8, 2, 64, 512


class Attention(nnx.Module):
    """Grouped-query attention that remembers what it has seen.

    Args:
      capacity: tokens that a row can hold.
      config: what to promise.
      rngs: for the weights, and for the perturbations of every step.
    """

    def __init__(self, capacity: int, config: certjax.Config, *, rngs: nnx.Rngs):
        self.query = nnx.LinearGeneral(FEATURES, (HEADS, HEAD_DIM), rngs=rngs)
        self.key = nnx.LinearGeneral(FEATURES, (KV_HEADS, HEAD_DIM), rngs=rngs)
        self.value = nnx.LinearGeneral(FEATURES, (KV_HEADS, HEAD_DIM), rngs=rngs)
        self.out = nnx.LinearGeneral((HEADS, HEAD_DIM), FEATURES, axis=(-2, -1), rngs=rngs)
        # Random weights attend to everything alike; trained ones do not. Larger queries make the softmax choose.
        self.query.kernel[...] *= 5
        # In the place of two buffers [B, S, K, H] and an index.
        self.cache = nnx.Cache(
            certjax.init_cache(batch=BATCH, kv_heads=KV_HEADS, head_dim=HEAD_DIM, capacity=capacity, dtype=jnp.bfloat16)
        )
        self.hint = nnx.Cache(certjax.init_hint(batch=BATCH, heads=HEADS))
        self.rngs = rngs.attention.fork()  # a stream of its own: another key at every call
        self.config = nnx.static(config)

    def read(self, x: jax.Array) -> None:
        """Takes the keys and values of a prompt [B, T, F] into the cache."""
        cache = certjax.prefill(self.cache.get_value(), self.key(x), self.value(x), query=self.query(x))
        self.cache.set_value(cache)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, certjax.Certificate, jax.Array]:
        """One step: outputs of tokens [B, 1, F], their certificate, and the true errors [B, N] for this example."""
        query, key, value = self.query(x), self.key(x), self.value(x)
        self.cache.set_value(certjax.append(self.cache.get_value(), key, value))
        result = certjax.decode_attention(
            query, self.cache.get_value(), rng=self.rngs(), config=self.config, hint=self.hint.get_value()
        )
        self.hint.set_value(result.hint)

        exact = certjax.dense_decode_attention(query, self.cache.get_value()).output
        return self.out(result.output), result.certificate, jnp.linalg.norm(result.output - exact, axis=-1)[:, 0]


@nnx.jit(donate_argnums=0)
def read(layer, x):
    """Compiled `Attention.read`; the layer is donated, so its cache is updated in place."""
    layer.read(x)


@nnx.jit(donate_argnums=0)
def step(layer, x):
    """Compiled step, likewise."""
    return layer(x)


def main(context: int = 8192, steps: int = 16) -> None:
    """Prints what each step's certificate says, and whether it was true."""
    delta = certjax.delta_per_call(0.01, heads=HEADS, layers=1, steps=steps, batch=BATCH)
    layer = Attention(context + steps, certjax.Config(epsilon=0.1, delta=delta), rngs=nnx.Rngs(0))
    read(layer, jax.random.normal(jax.random.key(1), (BATCH, context, FEATURES)))
    print(f"{BATCH} rows of {context} tokens, {HEADS} query heads; together within ε = 0.1 with probability 0.99")
    print("step  certified  sampled  keys read  largest bound  largest error")
    for i in range(steps):
        _, c, error = step(layer, jax.random.normal(jax.random.key(2 + i), (BATCH, 1, FEATURES)))
        sampled = c.certified & ~c.exact
        # Bounds and errors in units of M, the scale of the values under the attention weights.
        bound, error = (jnp.where(sampled, x / c.value_scale_lower, 0).max() for x in (c.error_bound, error))
        read_keys = jnp.where(sampled, c.keys_read, 0).sum() / jnp.maximum(sampled.sum(), 1)
        print(f"{i:4}  {c.certified.sum():9}  {sampled.sum():7}  {read_keys:9.0f}  {bound:13.3f}  {error:13.3f}")


if __name__ == "__main__":
    main()
