import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from certjax.models.llama.sampling import sample

LOGITS = jnp.log(jnp.array([[0.05, 0.5, 0.3, 0.15]], jnp.float32))


def frequencies(temperature, top_p, draws=4000, top_k=None):
    keys = jax.random.split(jax.random.key(0), draws)
    top_p = None if top_p is None else jnp.float32(top_p)
    logits = jnp.broadcast_to(LOGITS, (draws, 4))
    tokens = sample(logits, keys, temperature=jnp.float32(temperature), top_k=top_k, top_p=top_p)
    return np.bincount(np.asarray(tokens), minlength=4) / draws


def test_greedy_takes_the_largest():
    assert sample(LOGITS, jax.random.split(jax.random.key(0), 1), temperature=None).tolist() == [1]


def test_temperature_draws_from_the_distribution():
    np.testing.assert_allclose(frequencies(1.0, None), [0.05, 0.5, 0.3, 0.15], atol=0.03)
    squared = np.array([0.05, 0.5, 0.3, 0.15]) ** 2
    np.testing.assert_allclose(frequencies(0.5, None), squared / squared.sum(), atol=0.03)


def test_top_p_keeps_the_smallest_sufficient_set():
    for top_p, kept in (
        (0.01, [1]),
        (0.49, [1]),
        (0.51, [1, 2]),
        (0.79, [1, 2]),
        (0.81, [1, 2, 3]),
        (1.0, [0, 1, 2, 3]),
    ):
        drawn = frequencies(1.0, top_p)
        assert np.flatnonzero(drawn).tolist() == sorted(kept), top_p


def test_top_k_keeps_the_most_likely_and_top_p_looks_at_what_is_left():
    for top_k, top_p, kept in (
        (1, None, [1]),
        (2, None, [1, 2]),
        (3, None, [1, 2, 3]),
        (4, None, [0, 1, 2, 3]),
        (2, 0.62, [1]),  # 0.5 of the 0.8 that are left is 0.625
        (2, 0.63, [1, 2]),
    ):
        drawn = frequencies(1.0, top_p, top_k=top_k)
        assert np.flatnonzero(drawn).tolist() == sorted(kept), (top_k, top_p)
    np.testing.assert_allclose(frequencies(1.0, None, top_k=2)[[1, 2]], [0.625, 0.375], atol=0.03)


@given(st.integers(0, 2**31 - 1), st.floats(0.05, 1.0), st.floats(0.2, 5.0))
def test_top_p_never_draws_outside_the_set(seed, top_p, temperature):
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((3, 50)).astype(np.float32) * 3
    keys = jax.random.split(jax.random.key(seed), 3)
    tokens = sample(jnp.asarray(logits), keys, temperature=jnp.float32(temperature), top_p=jnp.float32(top_p))
    p = np.exp(logits.astype(np.float64) / temperature)
    p /= p.sum(-1, keepdims=True)
    for row, token in zip(p, np.asarray(tokens), strict=True):
        assert row[row > row[token]].sum() < top_p + 1e-5
