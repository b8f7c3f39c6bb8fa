"""Lloyd's k-means, and clusters of cached keys in ranked order."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from certjax.eval.methods.protocol import Problem, newest, oldest
from certjax.eval.methods.selection import top

ROUNDS = 6
_CHUNK = 4096  # points that are assigned at once


def kmeans(points: jax.Array, use: jax.Array, count: int, rng: jax.Array, rounds: int = ROUNDS):
    """Centres [count, D] and the label int32 [n] of every point, used or not.

    Starts at `count` of the used points, drawn at random; a centre without points stays where it is.

    Args:
      points: float32 [n, D].
      use: bool [1, n], points that move centres.
      count: clusters.
      rng: random key.
      rounds: iterations.

    Cost: O(rounds · n · count · D) time, O(4096 · count) memory.
    """
    first = top(jax.random.uniform(rng, use.shape), count, use)[0]
    centres = points[jnp.nonzero(first, size=count, fill_value=0)[0]]
    weight = use[0].astype(jnp.float32)[:, None]

    def move(_, centres):
        label = nearest(points, centres)
        add = lambda x: jnp.zeros((count, x.shape[1]), jnp.float32).at[label].add(x)
        size = add(weight)
        return jnp.where(size > 0, add(points * weight) / jnp.maximum(size, 1), centres)

    centres = jax.lax.fori_loop(0, rounds, move, centres)
    return centres, nearest(points, centres)


def nearest(points: jax.Array, centres: jax.Array) -> jax.Array:
    """Index of the centre nearest to every point, int32 [n]."""
    half = 0.5 * (centres * centres).sum(-1)

    def closest(part):
        distance = half[None] - part @ centres.T
        least = distance.min(-1, keepdims=True)
        # Two minima are several times as fast as an argmin, which XLA does not vectorise on CPUs.
        return jnp.where(distance == least, jnp.arange(half.size, dtype=jnp.int32)[None], half.size).min(-1)

    n = points.shape[0]
    padded = jnp.pad(points, ((0, -n % _CHUNK), (0, 0))) if n > _CHUNK else points
    return jax.lax.map(closest, padded.reshape(-1, min(n, _CHUNK), points.shape[1])).reshape(-1)[:n]


class Clusters(NamedTuple):
    """Clusters of the keys before the window and behind the sinks.

    Attributes:
      centre: float32 [C, H], mean key.
      label: int32 [n]; C for a key in no cluster.
      size: int32 [C].
      within: int32 [n], how many keys of its cluster come before a key.
    """

    centre: jax.Array
    label: jax.Array
    size: jax.Array
    within: jax.Array


def cluster_keys(problem: Problem, count: int, sinks: int, rng: jax.Array, *, cosine: bool) -> Clusters:
    """K-means of the keys, of their directions where `cosine`."""
    keys = problem.keys.astype(jnp.float32)
    use = ~newest(problem) & ~oldest(problem, sinks)
    norm = jnp.sqrt((keys * keys).sum(-1, keepdims=True))
    points = keys / jnp.maximum(norm, 1e-30) if cosine else keys
    centre, label = kmeans(points, use, count, rng)
    if cosine:  # nearest by angle, and the mean of the keys themselves
        label = nearest(points, centre / jnp.maximum(jnp.sqrt((centre * centre).sum(-1, keepdims=True)), 1e-30))
    return group(keys, jnp.where(use[0], label, count), count)


def group(keys: jax.Array, label: jax.Array, count: int) -> Clusters:
    """Means, sizes and places of given clusters; keys labelled `count` belong to none."""
    size = jnp.zeros(count + 1, jnp.int32).at[label].add(1)
    total = jnp.zeros((count + 1, keys.shape[1]), jnp.float32).at[label].add(keys)
    centre = total / jnp.maximum(size, 1).astype(jnp.float32)[:, None]
    order = jnp.argsort(label, stable=True)
    start = jnp.cumsum(size) - size
    within = jnp.zeros_like(label).at[order].set(jnp.arange(label.size, dtype=jnp.int32) - start[label[order]])
    return Clusters(centre[:-1], label, size[:-1], within)


def places(clusters: Clusters, query: jax.Array) -> jax.Array:
    """Place of every key when clusters follow each other by descending q · centre and their keys by age.

    Returns:
      int32 [G, n] from 0; n for a key in no cluster.
    """
    n = clusters.label.size
    rank = jnp.where(clusters.size[None] > 0, query @ clusters.centre.T, -jnp.inf)
    order = jnp.argsort(-rank, axis=-1, stable=True)
    size = clusters.size[order]
    start = jnp.put_along_axis(jnp.zeros_like(size), order, jnp.cumsum(size, -1) - size, -1, inplace=False)
    start = jnp.pad(start, ((0, 0), (0, 1)), constant_values=n)
    return jnp.minimum(start[:, clusters.label] + clusters.within[None], n)
