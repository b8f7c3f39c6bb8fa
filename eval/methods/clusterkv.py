"""ClusterKV: clusters of keys by direction, taken whole in the order of q · centre until the budget is full."""

from certjax.eval.methods.kmeans import cluster_keys, places
from certjax.eval.methods.protocol import Method, Outcome, Problem, attend_to, newest, number, oldest, row_bytes

SINKS = 16
KEYS_PER_CLUSTER = 80


def prepare(problem: Problem, rng):
    """`Clusters` by cosine k-means of the keys after RoPE, one for every 80 keys, sinks and window left out."""
    return cluster_keys(problem, max(problem.shape[0] // KEYS_PER_CLUSTER, 1), SINKS, rng, cosine=True)


def attend(problem: Problem, index, query, budget, rng) -> Outcome:
    """16 sinks, the window, and for each query head whole clusters; of the last one the oldest keys that fit.

    Bytes: rows read and centres in the cache's dtype, once for the group, and a 4-byte index a key that is read.
    """
    certain = newest(problem) | oldest(problem, SINKS)
    read = (places(index, query) < budget - certain.sum()) | certain
    index_bytes = index.size.size * row_bytes(problem) + 4 * number(read & ~certain)
    return attend_to(problem, query, read, index_bytes=index_bytes)


METHOD = Method("clusterkv", "ClusterKV", "2412.03213", "selection", prepare, attend)
