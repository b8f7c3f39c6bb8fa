"""Squeezed Attention: clusters of keys whose centre's share of the softmax exceeds a calibrated threshold.

Share of cluster j: exp(q·c_j) / Σ_i N_i exp(q·c_i), N_i the sizes. One threshold serves all heads of the group; it is
set on the last past queries, so that they would read the budget in the mean. Without the hierarchical look-up.
"""

import jax
import jax.numpy as jnp

from certjax.eval.methods.kmeans import Clusters, cluster_keys
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, beyond_window, newest, number, row_bytes

KEYS_PER_CLUSTER = 20
QUERIES = 64


def prepare(problem: Problem, rng):
    """(`Clusters` by k-means, one for every 20 keys, and the thresholds that `calibrate` tabulates)."""
    clusters = cluster_keys(problem, max(problem.shape[0] // KEYS_PER_CLUSTER, 1), 0, rng, cosine=False)
    return clusters, calibrate(problem, clusters)


def calibrate(problem: Problem, clusters: Clusters):
    """Shares (logarithms) of past queries and clusters in descending order, and the mean keys read down to each."""
    assert problem.past_queries is not None
    past = problem.past_queries[-QUERIES:].reshape(-1, problem.shape[1])
    share = log_shares(problem, clusters, past).reshape(-1)
    order = jnp.argsort(-share)
    size = jnp.broadcast_to(clusters.size, (past.shape[0], clusters.size.size)).reshape(-1)
    return share[order], jnp.cumsum(size[order]).astype(jnp.float32) / past.shape[0]


def log_shares(problem: Problem, clusters: Clusters, query):
    """Ln of the share of one key of each cluster, float32 [G, C]; −inf where it is empty."""
    score = (query @ clusters.centre.T) * jnp.float32(problem.scale)
    size = clusters.size.astype(jnp.float32)[None]
    score = jnp.where(size > 0, score, -jnp.inf)
    return score - jax.scipy.special.logsumexp(score + jnp.log(jnp.maximum(size, 1)), axis=-1, keepdims=True)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """The window and all keys of the clusters above the threshold of this budget; more or fewer than the budget.

    Bytes: rows read and centres in the cache's dtype, once for the group, and a 4-byte index a key that is read.
    """
    clusters, (share, keys) = index
    room = beyond_window(problem, budget).astype(jnp.float32)
    within = (keys <= room).sum()
    threshold = jnp.where(within > 0, share[jnp.maximum(within - 1, 0)], jnp.inf)
    threshold = jnp.where(within == share.size, -jnp.inf, threshold)
    taken = jnp.pad(log_shares(problem, clusters, query) >= threshold, ((0, 0), (0, 1)))
    window = newest(problem)
    read = taken[:, clusters.label] & ~window
    index_bytes = clusters.size.size * row_bytes(problem) + 4 * number(read)
    return attend_to(problem, query, read | window, index_bytes=index_bytes)


METHOD = Method(
    "squeezed", "Squeezed Attention", "2411.09688", "selection", prepare, attend, budget="mean", history=True
)
