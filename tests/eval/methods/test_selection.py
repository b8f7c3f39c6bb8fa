import chex
import hypothesis
import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np

from certjax.eval.methods import selection
from tests.shared.problems import jit

N = 24
numbers = st.sampled_from([-np.inf, -2.5, -1.0, -0.0, 0.0, 1e-30, 0.5, 0.5, 1.0, 3e38])
rows = st.lists(numbers, min_size=N, max_size=N)
TOP, TOP_MASS = jit(selection.top), jit(selection.top_mass)
masks = st.lists(st.booleans(), min_size=N, max_size=N)


@hypothesis.given(score=rows, allowed=masks, count=st.integers(0, N + 2))
def test_top_is_a_stable_sort(score, allowed, count):
    score, allowed = np.asarray(score, np.float32) + np.float32(0), np.asarray(allowed)
    order = [i for i in np.argsort(-score, kind="stable") if allowed[i]]
    want = np.isin(np.arange(N), order[:count])
    got = TOP(jnp.asarray(score)[None], jnp.int32(count), jnp.asarray(allowed)[None])
    chex.assert_trees_all_equal(np.asarray(got)[0], want)


@hypothesis.given(weight=st.lists(st.integers(0, 9), min_size=N, max_size=N), allowed=masks, mass=st.integers(-1, 250))
def test_top_mass_is_the_shortest_prefix(weight, allowed, mass):
    weight, allowed = np.asarray(weight, np.float32), np.asarray(allowed)
    got = TOP_MASS(jnp.asarray(weight)[None], jnp.float32(mass), jnp.asarray(allowed)[None])[0]
    got = np.asarray(got)
    assert not (got & ~allowed).any()
    descending = np.sort(weight[allowed])[::-1]
    enough = np.flatnonzero(np.concatenate([[0], np.cumsum(descending)]) >= mass)
    if enough.size:
        assert got.sum() == enough[0]
        assert weight[got].sum() == descending[: enough[0]].sum()
    else:
        chex.assert_trees_all_equal(got, allowed)


def test_fill_stops_at_the_first_block_that_does_not_fit():
    score = jnp.asarray([[3.0, 2.0, 1.0, 9.0, -jnp.inf], [1.0, 2.0, 3.0, 4.0, -jnp.inf]])
    got = jit(selection.fill)(score, jnp.asarray([4, 5, 1, 0, 0]), 6)
    chex.assert_trees_all_equal(got, jnp.asarray([[True, False, False, True, False], [False, True, True, True, False]]))
