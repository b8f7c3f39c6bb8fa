"""What holds for every registered method."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certjax.eval.methods import METHODS, Problem
from certjax.eval.methods.protocol import check
from tests.shared.problems import G, compiled, example, jit

BUDGETS = (96, 203)
N = 300
# Not dense with a budget of all keys: a layer's share of it, rebuilt keys, a sample that ends where its bound is met.
APPROXIMATE = ("pyramidkv", "shadowkv", "vattention_asis", "vattention_fixed")


@functools.cache
def run(name, budget, seed=0):
    method, problem, query = METHODS[name], *example(N)
    check(method, problem, budget)
    prepare, attend = compiled(method)
    return attend(problem, prepare(problem, jax.random.key(7)), query, budget, jax.random.key(seed))


def amounts(method):
    """Two budgets, or two numbers for the knob, fewer keys first."""
    if method.knob is None:
        return BUDGETS
    knob = method.knob
    return tuple(float(knob.fewest * (knob.most / knob.fewest) ** t) for t in (0.3, 0.8))


def dense(problem, query):
    score = query @ np.asarray(problem.keys, np.float32).T * problem.scale
    weight = np.exp(score - score.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ np.asarray(problem.values, np.float32)


each_method = pytest.mark.parametrize("name", METHODS)


@each_method
def test_reads_no_more_than_it_may(name):
    method, (problem, _) = METHODS[name], example(N)
    few, many = amounts(method)
    for amount in (few, many):
        out = run(name, amount)
        chex.assert_shape((out.output, out.keys_read, out.bytes_read), [(G, 16), (G,), (G,)])
        assert out.output.dtype == out.bytes_read.dtype == jnp.float32
        assert out.keys_read.dtype == jnp.int32
        assert np.isfinite(out.output).all()
        keys = np.asarray(out.keys_read)
        assert (keys >= problem.window).all()
        assert (keys <= N).all()
        if method.budget == "hard":
            assert (keys <= amount).all()
        # At best all heads of a group read the same rows, and keys are rebuilt from less than a row.
        assert (np.asarray(out.bytes_read) * G > keys.max() * 16 * 2).all()
    assert (np.asarray(run(name, few).keys_read) <= np.asarray(run(name, many).keys_read)).all()


@each_method
def test_same_key_same_result(name):
    method = METHODS[name]
    prepare, attend = compiled(method)
    problem, query = example(N)
    amount = amounts(method)[1]
    again = attend(problem, prepare(problem, jax.random.key(7)), query, amount, jax.random.key(0))
    chex.assert_trees_all_equal(again, run(name, amount))


@each_method
def test_budget_of_all_keys_is_dense(name):
    method = METHODS[name]
    if method.knob is not None or name in APPROXIMATE:
        return
    problem, query = example(N)
    out = run(name, N)
    chex.assert_trees_all_equal(out.keys_read, jnp.full(G, N, jnp.int32))
    chex.assert_trees_all_close(out.output, dense(problem, query), atol=2e-5)


def test_check_names_the_mistake():
    problem, _ = example(N)
    with pytest.raises(ValueError, match=r"budget must be at least window \+ 16"):
        check(METHODS["quest"], problem, 70)
    with pytest.raises(ValueError, match="h2o needs past_queries"):
        check(METHODS["h2o"], Problem(problem.keys, problem.values), 200)
    with pytest.raises(ValueError, match="values must be bfloat16"):
        check(METHODS["quest"], Problem(problem.keys, problem.values.astype(jnp.float32)), 200)
    with pytest.raises(ValueError, match="past_queries must be"):
        check(METHODS["h2o"], Problem(problem.keys, problem.values, problem.past_queries, jnp.arange(3)), 200)


def test_names_are_the_keys():
    for name, method in METHODS.items():
        assert method.name == name
        assert (method.knob is not None) == (method.budget == "none" and name != "dense")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.family != "certified"])
def test_kv_heads_can_be_mapped(name):
    method, (problem, query) = METHODS[name], example(N)
    amount, rng = amounts(method)[0], jax.random.key(0)
    other = dataclasses.replace(problem, keys=problem.keys[:, ::-1], values=-problem.values)
    both = jax.tree.map(lambda *x: jnp.stack(x), problem, other)
    prepare, attend = jax.vmap(method.prepare, (0, None)), jax.vmap(method.attend, (0, 0, None, None, None))
    out = jit(attend)(both, jit(prepare)(both, jax.random.key(7)), query, amount, rng)
    alone = run(name, amount)
    chex.assert_trees_all_close(jax.tree.map(lambda x: x[0], out), alone, rtol=1e-4, atol=1e-5)
