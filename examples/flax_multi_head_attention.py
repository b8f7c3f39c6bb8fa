"""Certified attention in a stock `flax.nnx.MultiHeadAttention`: the same weights decode with and without it.

Run it as `python examples/flax_multi_head_attention.py`.
"""

import functools
import time

import jax
import jax.numpy as jnp
from flax import nnx

import certjax.nnx

HEADS, KV_HEADS, FEATURES = 8, 2, 512


def make_layer(capacity, config=None):
    """The layer with empty caches; with a certjax.Config, its decode steps are certified."""
    rngs = nnx.Rngs(0)
    layer = nnx.MultiHeadAttention(HEADS, FEATURES, num_kv_heads=KV_HEADS, decode=True, rngs=rngs)
    # Random weights attend to everything alike; trained ones do not. Larger queries make the softmax choose.
    layer.query.kernel[...] *= 5
    shape = (1, capacity, FEATURES)
    if config is None:
        layer.init_cache(shape)
    else:
        layer.attention_fn = nnx.data(certjax.nnx.CertifiedAttention(config, rngs=rngs))
        certjax.nnx.init_cache(layer, shape)
    return layer


def decode(layer, tokens):
    """Outputs [T, F] of tokens [T, F] fed one by one, certificates of each step if any, and seconds a step."""
    graphdef, weights, state = nnx.split(layer, nnx.Param, ...)  # once; the state holds caches, hint and random key

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, token):
        layer = nnx.merge(graphdef, weights, state)
        output = layer(token[None, None])[0, 0]
        return nnx.state(layer, nnx.Not(nnx.Param)), output

    outputs, certificates, seconds = [], [], []
    for token in tokens:
        start = time.perf_counter()
        state, output = jax.block_until_ready(step(state, token))
        seconds.append(time.perf_counter() - start)
        outputs.append(output)
        if "attention_fn" in state:
            # Copied, since the next step takes the state's buffers.
            certificates.append(jax.device_get(state["attention_fn"]["certificate"].get_value()))
    return jnp.stack(outputs), certificates, sorted(seconds)[len(seconds) // 2]


def main(context: int = 8192, steps: int = 24) -> None:
    """Prints what was certified, how far the two outputs are apart, and how long a step takes."""
    context_keys = jax.random.normal(jax.random.key(1), (2, 1, context, KV_HEADS, FEATURES // HEADS))
    tokens = jax.random.normal(jax.random.key(2), (steps, FEATURES))
    results = []
    for config in (None, certjax.Config(epsilon=0.1, delta=1e-3)):
        layer = make_layer(context + steps, config)
        # A prompt may be fed token by token too; what fills the layer's own buffers is found by the first step.
        layer.cached_key[:, :context], layer.cached_value[:, :context] = context_keys
        layer.cache_index[...] += context
        results.append(decode(layer, tokens))
    (plain, _, plain_seconds), (output, certificates, seconds) = results

    c = jax.tree.map(lambda *x: jnp.stack(x), *certificates)  # every field [steps, B, N]
    sampled = c.certified & ~c.exact
    error = jnp.linalg.norm(output - plain, axis=-1) / jnp.linalg.norm(plain, axis=-1)
    print(f"{steps} steps after {context} tokens, {HEADS} query heads, ε = 0.1, δ = 0.001")
    print(f"heads and steps   {c.certified.sum()} of {c.certified.size} certified, {sampled.sum()} of them sampled")
    if sampled.any():
        print(f"keys read         {c.keys_read[sampled].mean():.0f} by a sampled head, of {context + steps // 2}")
        print(
            f"bound on a head   {(c.error_bound / c.value_scale_lower)[sampled].max():.3f} of the values' scale at most"
        )
    print(f"layer's output    differs from the plain layer's by {error.max():.3f} of its norm at most")
    print(f"time of a step    {1e3 * plain_seconds:.2f} ms plain, {1e3 * seconds:.2f} ms certified")


if __name__ == "__main__":
    main()
