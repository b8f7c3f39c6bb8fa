"""The stock Flax attention layer, with certified decode steps and without, and what the tests do with both."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

import certjax
import certjax.nnx
from certjax.nnx import CertifiedAttention

B, S, N, K, H = 2, 192, 4, 2, 16
F = N * H
SHAPE = (B, S, F)


def make_layer(certified=True, rngs=None, **options):
    """A layer whose output is that of the heads, [B, 1, N · H], and whose weights are always the same."""
    layer = nnx.MultiHeadAttention(N, F, num_kv_heads=K, decode=True, rngs=nnx.Rngs(0), **options)
    layer.out.kernel[...] = jnp.eye(F).reshape(N, H, F)
    layer.query.kernel[...] *= 4
    if certified:
        config = certjax.Config(epsilon=0.5, delta=1e-6, window=16, always_sample=True)
        layer.attention_fn = nnx.data(CertifiedAttention(config, rngs=nnx.Rngs(7) if rngs is None else rngs))
    return layer


def make_pair(shape=SHAPE):
    """The certified layer and the stock one, with empty caches."""
    layer, stock = make_layer(), make_layer(certified=False)
    certjax.nnx.init_cache(layer, shape)
    stock.init_cache(shape)
    return layer, stock


def draw(steps, *, shape=(B, 1, F), seed=0):
    """Tokens of some steps; by numpy, since jax.random compiles for seconds."""
    return np.random.default_rng(seed).normal(size=(steps, *shape)).astype(np.float32)


def certificate(layer):
    return layer.attention_fn.certificate.get_value()


@nnx.jit
def masked_step(layer, x, mask):
    return layer(x, mask=mask)


def step(layer, x, mask=True):
    """One program for all tests: the mask is combined with that of the decode mode."""
    return masked_step(layer, x, jnp.broadcast_to(mask, (B, N, 1, S)))


def assert_within_bounds(output, stock, c):
    """Heads' errors are within their bounds, or 1e-5 where exact; shapes [..., B, 1, N · H] and [..., B, N]."""
    error = np.linalg.norm(np.asarray(output - stock).reshape(*c.exact.shape, H), axis=-1)
    assert np.asarray(c.certified).all()
    np.testing.assert_array_less(error, np.where(c.exact, 1e-5, c.error_bound))
