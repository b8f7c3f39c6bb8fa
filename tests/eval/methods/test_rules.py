"""Rules of the oracles and of the methods that select keys for each query, on cases worked out by hand."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

from certjax.eval.methods import METHODS, kmeans, rotary, shadowkv, socket, squeezed, tactic
from tests.shared.problems import answer, by_hand, compiled, jit, read_by

LOW = -20.0
group = jit(kmeans.group, static_argnums=2)


def test_oracle_topk_takes_the_largest_scores():
    keys = np.stack([[3, 1, 2, 5, 0, 9], np.zeros(6)], 1)
    assert read_by(METHODS["oracle_topk"], by_hand(keys), [[1, 0], [-1, 0]], 3) == [[0, 3, 5], [1, 4, 5]]


def test_oracle_topp_takes_the_fewest_that_hold_the_mass():
    # Weights 8, 4, 2, 1 and 1 in the window, of 16. p = 0.8 needs 12.8: 8 + 4 + 1 is enough; p = 0.82 needs 13.12.
    problem = by_hand(np.log([1.0, 8, 2, 4, 1]))
    assert read_by(METHODS["oracle_topp"], problem, [[1.0]], 0.8) == [[1, 3, 4]]
    assert read_by(METHODS["oracle_topp"], problem, [[1.0]], 0.82) == [[1, 2, 3, 4]]


def test_quest_ranks_pages_by_their_bound():
    # Page 0 holds (3, −3), page 1 holds (3, 0) and (0, 3). Bounds of q = (1, 1): 3 and 6, which no key has; of (1, −1):
    # 6 and 3.
    keys = np.zeros((48, 2))
    keys[[5, 16, 17]] = [[3, -3], [3, 0], [0, 3]]
    pages = read_by(METHODS["quest"], by_hand(keys, window=16), [[1, 1], [1, -1]], 33)
    assert pages == [list(range(16, 48)), [*range(16), *range(32, 48)]]


def test_infllm_ranks_blocks_by_their_representatives():
    # Past queries want channel 0: keys 3, 5, 7, 9 represent block 0 and speak against it, though its mean is higher.
    keys = np.zeros((320, 2))
    keys[:128, 1], keys[128:256, 1] = 1, -1
    keys[[3, 5, 7, 9]] = [[1, -1]] * 4
    keys[[130, 140, 150, 160]] = [[1, 1]] * 4
    problem = by_hand(keys, window=64, past=[[[3.0, 0.0]]], positions=[319])
    # 176 keys beside the window: 44 initial ones, block 1, and the 4 newest that are left.
    assert read_by(METHODS["infllm"], problem, [[0.0, 1.0]], 240) == [[*range(44), *range(124, 320)]]


def test_double_sparsity_scores_on_the_labelled_channel():
    # H = 8, one channel: mean |q| · mean |k| is largest for channel 3, though the query weighs channel 0 more.
    keys = np.zeros((17, 8))
    keys[:, 0] = 5 * np.arange(17)[::-1]
    keys[:, 3] = [*range(15, -1, -1), 7]
    keys[[2, 9], 3] = keys[[9, 2], 3]  # 6 and 13
    past = np.zeros((1, 1, 8))
    past[..., 0], past[..., 3] = 1e-3, 1
    problem = by_hand(keys, past=past, positions=[16])
    query = np.eye(8)[[0]] * -0.05 + np.eye(8)[[3]] * 0.1
    channels, label = compiled(METHODS["double_sparsity"])[0](problem, None)
    assert channels.tolist() == [3]
    chex.assert_trees_all_close(label[:, 0], problem.keys[:, 3], atol=1e-5)  # 16 levels are exact
    assert read_by(METHODS["double_sparsity"], problem, query, 4) == [[0, 1, 9, 16]]


def test_sparq_mixes_in_the_mean_value():
    # H = 4, one channel: Σ |q| over the group is largest for channel 1. Temperature √(4 · |q_1| / Σ |q|).
    keys = np.asarray([[0, 1, 0, 3], [0, 3, 0, 0], [1, 2, 0, 0], [0, -1, 2, 0], [0, 0, 0, 1]], float)
    query = np.asarray([[0.5, 1, 0, 0.5], [0, 2, 1.5, 0]])
    problem = by_hand(keys)
    out = answer(METHODS["sparq"], problem, query, 3)
    share = np.abs(query[:, 1:2]) / np.abs(query).sum(1, keepdims=True)
    weight = np.exp(query[:, 1:2] * keys[:, 1] / np.sqrt(share))
    weight /= weight.sum(1, keepdims=True)
    read = np.asarray([False, True, True, False, True])
    attention = np.where(read, np.exp(query @ keys.T), 0)
    attention /= attention.sum(1, keepdims=True)
    alpha = weight[:, read].sum(1, keepdims=True)
    want = alpha * attention + (1 - alpha) / 5
    chex.assert_trees_all_close(np.asarray(out.output), want.astype(np.float32), rtol=1e-4)
    assert out.keys_read.tolist() == [3, 3]


def test_loki_scores_on_the_first_component():
    # The keys vary along (1, 1, 0, 0); the query weighs channel 3 more, which the component does not see.
    along = np.asarray([3, -3, 1, 2, -1, -2, 0, 0])
    keys = along[:, None] * np.asarray([1, 1, 0, 0]) + np.asarray([0.1, -0.1] * 4)[:, None] * np.asarray([0, 0, 0, 1])
    assert read_by(METHODS["loki"], by_hand(keys), [[1, 1, 0, -50], [-1, -1, 0, 50]], 3) == [[0, 3, 7], [1, 5, 7]]


def test_pqcache_adds_table_entries_and_sums_over_the_group():
    # Two halves of one channel. Key codes (0, 1), (1, 0), (1, 1), (0, 0) and the window; centres 1, 2 and 10, 30.
    centres = jnp.asarray([[[1.0], [2.0]], [[10.0], [30.0]]])
    codes = jnp.asarray([[0, 1, 1, 0, 0], [1, 0, 1, 0, 0]])
    problem = by_hand(np.zeros((5, 2)))
    read = lambda query: read_by(METHODS["pqcache"], problem, query, 3, (centres, codes))
    assert read([[1, 0.01]]) == [[1, 2, 4]]  # 1.3, 2.1, 2.3, 1.1
    assert read([[0.01, 0.1]]) == [[0, 2, 4]]  # 3.01, 1.02, 3.02, 1.01
    # A group is as sharp as its heads: the first hardly cares, the second wants keys 3 and 1, with one set for both.
    assert read([[0.1, 0.01], [0, -1]]) == [[1, 3, 4]] * 2


def test_squeezed_keeps_clusters_above_the_calibrated_threshold():
    # Centres 2, 1, 0 of 2, 1 and 3 keys. The past query 1 has the shares e², e, 1 of 2e² + e + 3: 3 keys are read down
    # to e / 20.5 = 0.133. The query 2 has 0.457, 0.062, 0.008; the query 0.1 has 0.187, 0.169, 0.153.
    keys = np.asarray([2.0, 0, 1, 0, 2, 0, 5])
    problem = by_hand(keys, past=[[[1.0]]], positions=[6])
    clusters = group(problem.keys, jnp.asarray([0, 2, 1, 2, 0, 2, 3]), 3)
    index = (clusters, jit(squeezed.calibrate)(problem, clusters))
    read = lambda query: read_by(METHODS["squeezed"], problem, [[query]], 4, index)
    assert read(1.0) == [[0, 2, 4, 6]]
    assert read(2.0) == [[0, 4, 6]]
    assert read(0.1) == [[0, 1, 2, 3, 4, 5, 6]]


def test_clusterkv_trims_the_last_cluster():
    # Behind 16 sinks: clusters 0 (keys 16, 19) and 1 (17, 18, 20), the window 21. 3 keys are left.
    keys = np.zeros(22)
    keys[[16, 19]], keys[[17, 18, 20]] = 1, -1
    problem = by_hand(keys)
    clusters = group(problem.keys, jnp.asarray([2] * 16 + [0, 1, 1, 0, 1, 2]), 2)
    sinks = list(range(16))
    assert read_by(METHODS["clusterkv"], problem, [[1.0], [-1.0]], 20, clusters) == [
        [*sinks, 16, 17, 19, 21],
        [*sinks, 17, 18, 20, 21],
    ]


def test_kmeans_finds_separate_clusters():
    rng = np.random.default_rng(0)
    true = np.repeat([0, 1, 2], 30)
    points = np.asarray([[4, 0], [0, 4], [-4, -4]])[true] + 0.3 * rng.standard_normal((90, 2))
    use = jnp.ones((1, 90), bool)
    run = jit(lambda seed: kmeans.kmeans(jnp.asarray(points, jnp.float32), use, 3, jax.random.key(seed)))
    for seed in range(20):  # some starts have two centres in one cluster
        centres, label = run(seed)
        found = np.asarray([np.bincount(np.asarray(label)[true == k], minlength=3) for k in range(3)])
        if (found.max(1) == 30).all() and (found.argmax(1)[:, None] == found.argmax(1)).sum() == 3:
            means = [points[true == k].mean(0) for k in range(3)]
            chex.assert_trees_all_close(np.asarray(centres)[found.argmax(1)], np.float32(means), atol=1e-5)
            break
    else:
        raise AssertionError("no start of twenty finds the three clusters")


def test_tactic_stops_where_the_fitted_curve_reaches_p():
    # 400 clusters of one key whose weights are 3 / x + 0.01 in the order of q · centre: the fit is nearly exact.
    x = np.arange(1, 401)
    weight = np.append(3 / x + 0.01, 0.5)
    keys = np.log(weight)
    problem = by_hand(keys)
    clusters = group(problem.keys, jnp.asarray([*range(400), 400]), 400)
    out = answer(METHODS["tactic"], problem, [[1.0]], 0.9, clusters)
    want = np.flatnonzero(np.cumsum(weight[:400]) + 0.5 >= 0.9 * weight.sum())[0] + 2  # keys, and the window
    assert abs(int(out.keys_read[0]) - want) <= 0.02 * want
    near, far = ((x, 3 / x + 0.01) for x in (44.5, 244.5))
    mass = tactic.prefix_mass(np.zeros((1, 400), np.float32), np.float32(x)[None], 0, 400, near, far)
    chex.assert_trees_all_close(np.asarray(mass)[0], np.cumsum(weight[:400]).astype(np.float32), rtol=1e-3)


def test_twilight_prunes_what_quest_found():
    # 128 keys, so a quarter is two pages: those of keys 0 and 48; key 80 is in no candidate page. Weights 8, 4, 2 and 1
    # in the window, of 15: p = 0.8 needs 12, p = 0.9 needs 13.5.
    keys = np.full((128, 2), LOW)
    keys[:, 1] = 0
    keys[[0, 1, 48, 80], 0] = np.log([8, 4, 2, 1.5])
    keys[112:, 0] = np.log(1 / 16)
    window = list(range(112, 128))
    problem = by_hand(keys, window=16)
    assert read_by(METHODS["twilight"], problem, [[1, 0]], 0.8) == [[0, 1, *window]]
    assert read_by(METHODS["twilight"], problem, [[1, 0]], 0.9) == [[0, 1, 48, *window]]
    assert answer(METHODS["twilight"], problem, [[1, 0]], 1.0).keys_read[0] <= 32 + 16


def shadow(keys):
    n, H = keys.shape
    angle = np.arange(n + 1)[:, None] * np.ones(H // 2)
    return by_hand(keys, window=8, cos=jnp.asarray(np.cos(angle)), sin=jnp.asarray(np.sin(angle)))


def test_shadowkv_takes_outliers_and_the_best_landmarks():
    # Chunks 0 to 7 before the window. 32 keys: one outlier chunk (2, which holds opposite keys), three by landmark, of
    # the head that wants them most: 5 and 0 for the first, 6 for the second.
    keys = np.repeat([[4, 0], [0, -1], [-1, 0], [0, -1], [0, -2], [5, 0], [0, 5], [1, 1], [0, 0]], 8, 0).astype(float)
    keys[[16, 18]] = [1, 0]
    chunks = read_by(METHODS["shadowkv"], shadow(keys), [[1, 0], [0, 1]], 40)
    assert chunks == [[i for c in (0, 2, 5, 6, 8) for i in range(8 * c, 8 * c + 8)]] * 2


def test_shadowkv_rebuilds_keys_before_rope():
    # Before RoPE the keys are multiples of one vector in the plane of channels 0 and 2, so half the rank is exact.
    size = 1 + np.arange(24)[:, None] % 5
    angle = np.arange(24)[:, None] * np.ones(1)
    keys = np.asarray(rotary.turn(jnp.asarray(size * [2.0, 1.0]), jnp.cos(angle), jnp.sin(angle)))
    problem = shadow(keys)
    _, _, rebuilt = compiled(shadowkv.METHOD)[0](problem, None)
    chex.assert_trees_all_close(rebuilt, problem.keys, atol=1e-4)
    back = rotary.turn_back(problem.keys, 2 * jnp.cos(angle), 2 * jnp.sin(angle))  # an attention factor of 2
    chex.assert_trees_all_close(back, jnp.asarray(size * [1.0, 0.5], jnp.float32), atol=1e-5)


def test_socket_gives_the_query_a_probability_for_every_bucket():
    # One table of two planes along the channels. P(sign) = σ(2 tanh(q_c) / (√2 · 0.5)) a channel.
    planes = jnp.eye(2)[None]
    codes = jnp.asarray([[3, 1, 2, 0, 3]], jnp.uint16)  # bit c of the bucket is the sign of channel c
    query = np.asarray([[0.8, -0.3]])
    plus = 1 / (1 + np.exp(-2 * np.tanh(query[0]) / (np.sqrt(2) * 0.5)))
    want = [plus[0] * plus[1], plus[0] * (1 - plus[1]), (1 - plus[0]) * plus[1], (1 - plus[0]) * (1 - plus[1])]
    mass = jit(socket.bucket_mass)(planes, codes, jnp.asarray(query, jnp.float32))
    chex.assert_trees_all_close(np.asarray(mass)[0], np.float32([*want, want[0]]), rtol=1e-5)
    # Times the value norms 1, 0.1, 1, 1, 1 key 1 falls from the first place to the third.
    problem, norm = by_hand(np.zeros((5, 2))), jnp.asarray([[1, 0.1, 1, 1, 1.0]])
    assert np.argsort(-np.asarray(want)).tolist() == [1, 0, 3, 2]
    assert read_by(METHODS["socket"], problem, query, 3, (planes, codes, norm)) == [[0, 3, 4]]
