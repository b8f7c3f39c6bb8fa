"""Inclusion probabilities and weights of the methods that sample."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats

from certjax.eval.methods import METHODS, hashes, magicpig, vattention
from tests.shared.problems import answer, by_hand, compiled, jit


def test_uniform_weights_are_n_over_m():
    # 40 equal keys, 8 in the window; 12 of the other 32 at the weight 32 / 12: the denominator is 40 in every draw.
    out = answer(METHODS["uniform"], by_hand(np.zeros(40), window=8), np.zeros((2, 1)), 20)
    output = np.asarray(out.output)
    chex.assert_trees_all_close(output[:, 32:], np.full((2, 8), 1 / 40, np.float32), rtol=1e-5)
    for row in output[:, :32]:
        chex.assert_trees_all_close(np.sort(row)[-12:], np.full(12, 32 / 12 / 40, np.float32), rtol=1e-5)
        assert (np.sort(row)[:20] == 0).all()
    assert ((output[0] > 0) == (output[1] > 0)).all()  # one sample for the group


def test_uniform_is_unbiased():
    problem = by_hand(np.zeros(40), window=8)
    attend = lambda seed: METHODS["uniform"].attend(problem, (), jnp.zeros((1, 1)), 20, jax.random.key(seed)).output[0]
    mean = np.asarray(jit(jax.vmap(attend))(jnp.arange(3000))).mean(0)
    # A share of 1/40 each; standard error (1/40) √((32/12 − 1) / 3000).
    assert np.abs(mean * 40 - 1).max() < 4.5 * np.sqrt((32 / 12 - 1) / 3000)


def test_magicpig_reads_with_the_stated_probability():
    rng = np.random.default_rng(1)
    query = rng.standard_normal((2, 6)).astype(np.float32)
    cosine = np.linspace(-0.3, 0.97, 24)
    away = rng.standard_normal((24, 6))
    unit = query[0] / np.linalg.norm(query[0])
    away -= np.outer(away @ unit, unit)
    away /= np.linalg.norm(away, axis=1, keepdims=True)
    keys = (cosine[:, None] * unit + np.sqrt(1 - cosine[:, None] ** 2) * away).astype(np.float32)
    tables, draws = 20, 4000

    def twice(seed):
        planes = hashes.draw_planes(jax.random.key(seed), tables, magicpig.BITS, 6)
        own, codes = hashes.buckets(planes, jnp.asarray(query)), hashes.buckets(planes, jnp.asarray(keys))
        return magicpig.collisions(codes, own, jnp.int32(tables))[0] >= 2

    hits = np.asarray(jit(lambda: jax.lax.map(twice, jnp.arange(draws)))()).sum(0)
    u = np.asarray(jit(magicpig.inclusion)(jnp.asarray(cosine, jnp.float32), jnp.int32(tables)), np.float64)
    x = (1 - np.arccos(cosine) / np.pi) ** 10
    chex.assert_trees_all_close(u, 1 - (1 - x) ** 19 * (1 - x + 20 * x), rtol=2e-3)
    for count, probability in zip(hits, u, strict=True):
        assert scipy.stats.binomtest(int(count), draws, probability).pvalue > 1e-4
    assert hits[-1] > 0.5 * draws


def test_magicpig_weighs_by_the_inverse_probability():
    rng = np.random.default_rng(2)
    keys = rng.standard_normal((60, 4)) + 3  # a mean that must be taken off
    problem = by_hand(keys, window=2)
    query = rng.standard_normal((1, 4))
    method = METHODS["magicpig"]
    index = compiled(method)[0](problem, jax.random.key(0))
    out = answer(method, problem, query, 150, index)
    certain = np.isin(np.arange(60), [0, 1, 2, 3, 58, 59])
    own = (np.asarray(index[0]) @ query[0] >= 0) @ 2 ** np.arange(10)
    read = (np.asarray(index[1])[:150] == own[:150, None]).sum(0) >= 2
    centred = keys - keys.mean(0)
    cosine = centred @ query[0] / np.linalg.norm(centred, axis=1) / np.linalg.norm(query)
    x = (1 - np.arccos(cosine) / np.pi) ** 10
    u = 1 - (1 - x) ** 149 * (1 - x + 150 * x)
    weight = np.exp(keys @ query[0]) * np.where(certain, 1, read / u)
    assert 10 < out.keys_read[0] < 60
    assert out.keys_read[0] == (read | certain).sum()
    chex.assert_trees_all_close(np.asarray(out.output)[0], (weight / weight.sum()).astype(np.float32), rtol=5e-3)


def test_vattention_sample_size():
    weight = jnp.asarray([[1.0, 0.5, 0.1, 0.2, 0.3, 0.4]])
    exact = jnp.asarray([[True, True, False, False, False, False]])
    base = jnp.asarray([[False, False, True, False, True, False]])
    # Base 0.1 and 0.3: mean 0.2, deviation √0.02; D̂ = 1.5 + 4 · 0.2; b = (1.64485 · √0.02 · 4 / (0.05 · 2.3))² = 65.46.
    assert jit(vattention.sample_size)(weight, exact, base, jnp.int32(4)).tolist() == [[66]]


def test_vattention_draws():
    pool = jnp.asarray([[False] * 10 + [True] * 50 + [False] * 4])
    seeds = jnp.arange(2000)
    draw = lambda f: np.asarray(jit(jax.vmap(lambda s: f(jax.random.key(s), pool, 64)[0]))(seeds))[:, 10:60]
    order = draw(vattention._draws_without)
    assert (np.sort(order, -1) == np.arange(50)).all()
    hit = draw(vattention._draws_with_replacement) < 30
    # Of 30 draws with replacement 50 (1 − (1 − 1/50)³⁰) = 22.7 are distinct: at the weight 50 / 30 a quarter is lost.
    expected = 50 * (1 - (1 - 1 / 50) ** 30)
    assert abs(hit.sum(-1).mean() - expected) < 4.5 * 1.9 / np.sqrt(2000)
    for inclusion in (order < 30).mean(0):
        assert abs(inclusion - 0.6) < 4.5 * np.sqrt(0.24 / 2000)


def test_vattention_ranges():
    # 100 keys, window 4, budget 52: 12 sinks, 18 top keys, and equal keys need no more than the base sample of 18 // 4.
    keys = np.zeros(100)
    keys[20:38] = 3
    problem = by_hand(keys, window=4)
    for name, pool in (("vattention_fixed", 66), ("vattention_asis", 84)):
        out = np.asarray(answer(METHODS[name], problem, [[1.0]], 52).output)[0]
        light = np.concatenate([out[12:20], out[38:96]])
        assert (out[20:38] > 0).all()
        if name == "vattention_fixed":
            assert (light > 0).sum() == 4
            chex.assert_trees_all_close(light[light > 0] / out[0], np.full(4, pool / 4, np.float32), rtol=1e-4)
        else:  # the top keys enter the deviation: the sample is as large as the budget allows
            assert 0 < (light > 0).sum() <= 18
            weight = light[light > 0] / out[0]
            chex.assert_trees_all_close(weight, np.full(weight.size, pool / 18, np.float32), rtol=1e-4)
