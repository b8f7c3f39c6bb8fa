"""Selection rules of the methods that keep keys without looking at the query, on cases worked out by hand."""

import chex
import jax.numpy as jnp
import numpy as np

from certjax.eval.methods import METHODS
from tests.shared.problems import answer, by_hand, compiled, read_by

# One channel; a past query +1 weights the keys 1, 2, 4, 1, 1, 1, and −1 weights them 1, ½, ¼, 1, 1, 1.
KEYS = np.log([1.0, 2, 4, 1, 1, 1])


def test_streaming_llm_keeps_four_sinks_and_the_newest():
    assert read_by(METHODS["streaming_llm"], by_hand(np.zeros(10)), [[1.0]], 6) == [[0, 1, 2, 3, 8, 9]]


def test_h2o_sums_over_past_queries():
    # Seen up to keys 4 and 5: sums 1/9 + 1/4.75, 2/9 + .5/4.75, 4/9 + .25/4.75, as the first: the largest are 2 and 1.
    problem = by_hand(KEYS, past=[[[1.0]], [[-1.0]]], positions=[4, 5])
    assert read_by(METHODS["h2o"], problem, [[1.0]], 4) == [[1, 2, 4, 5]]  # half of the budget is recent


def test_tova_takes_the_last_query_averaged_over_the_group():
    # Means over the heads +1 and −1: .311, .305, .453, .311, .311. The query before, which wants key 1, is forgotten.
    keys = np.stack([KEYS, [0, 9, 0, 0, 0, 0]], 1)
    problem = by_hand(keys, past=[[[0, 1], [0, 1]], [[1, 0], [-1, 0]]], positions=[5, 5])
    assert read_by(METHODS["tova"], problem, np.ones((2, 2)), 3) == [[0, 2, 5]] * 2


def test_scissorhands_counts_weights_below_the_mean():
    # Below 1/5 of 9: keys 0, 3, 4. Below 1/6 of 4.75: 1, 2. Below 1/6 of 10: 0, 3, 4, 5. Counts 2, 1, 1, 2, 2.
    problem = by_hand(KEYS, past=[[[1.0]], [[-1.0]], [[1.0]]], positions=[4, 5, 5])
    assert read_by(METHODS["scissorhands"], problem, [[1.0]], 4) == [[1, 2, 4, 5]]  # of equals the newest


def test_snapkv_pools_the_last_64_queries():
    # Keys 2 to 6 share what key 4 gets; the 6 queries before the last 64 want key 8.
    keys = np.zeros((12, 2))
    keys[4, 0] = keys[8, 1] = 5
    past = [[[0, 2], [0, 2]]] * 6 + [[[1, 0], [0, 0]]] * 64
    problem = by_hand(keys, past=past, positions=[11] * 70)
    assert read_by(METHODS["snapkv"], problem, np.ones((2, 2)), 6) == [[2, 3, 4, 5, 6, 11]] * 2


def test_pyramidkv_spends_more_in_lower_layers():
    # 20 keys beside the window of 4: at least 20 / 20 = 1, at most 2 · 20 − 1 = 39.
    for layer, keys in enumerate((39, 20, 1)):
        problem = by_hand(np.zeros(64), window=4, past=[[[1.0]]], positions=[63], layer=layer, layers=3)
        assert answer(METHODS["pyramidkv"], problem, [[1.0]], 24).keys_read.tolist() == [keys + 4]


def test_knorm_keeps_small_keys():
    keys = [[3, 0], [0, -1], [2, 2], [-0.5, 0], [9, 9]]
    assert read_by(METHODS["knorm"], by_hand(keys), [[1.0, 0.0]], 3) == [[1, 3, 4]]


def test_keydiff_keeps_keys_unlike_the_mean_direction():
    # Directions: east, east (long), north, west, and east in the window: the mean points east and a little north.
    keys = [[1, 0], [9, 0], [0, 1], [-1, 0], [1, 0]]
    assert read_by(METHODS["keydiff"], by_hand(keys), [[1.0, 0.0]], 3) == [[2, 3, 4]]


def test_expected_attention_is_the_gaussian_mean_of_the_weights():
    rng = np.random.default_rng(0)
    n, H, T = 40, 4, 12
    keys, past = rng.standard_normal((n, H)), rng.standard_normal((T, 2, H))
    angle = np.arange(n + 3)[:, None] * np.array([1.0, 0.1])

    def rotation(position):
        c, s = np.cos(angle[position]), np.sin(angle[position])
        return np.block([[np.diag(c), np.diag(-s)], [np.diag(s), np.diag(c)]])

    at = np.arange(n - T, n)
    table = {"cos": jnp.asarray(np.cos(angle), jnp.float32), "sin": jnp.asarray(np.sin(angle), jnp.float32)}
    problem = by_hand(keys, past=past, positions=at, **table)
    mean_rotation = np.mean([rotation(n + i) for i in range(3)], 0)
    plain = np.einsum("tij,tgi->tgj", [rotation(t) for t in at], past)  # transposed: turned back
    total = np.zeros(n)
    for head in range(2):
        mean = mean_rotation @ plain[:, head].mean(0)
        covariance = mean_rotation @ np.cov(plain[:, head].T) @ mean_rotation.T
        weight = np.exp(keys @ mean + 0.5 * np.einsum("ni,ij,nj->n", keys, covariance, keys))
        total += weight / weight.sum() / 2
    index = compiled(METHODS["expected_attention"])[0](problem, None)
    chex.assert_trees_all_close(np.asarray(index)[0], total.astype(np.float32), rtol=1e-4)
    best = sorted(np.argsort(-total[4:-1])[:5] + 4)  # 4 sinks and the window are there anyway
    want = [0, 1, 2, 3, *map(int, best), n - 1]
    assert read_by(METHODS["expected_attention"], problem, np.ones((2, H)), 10, index) == [want] * 2
