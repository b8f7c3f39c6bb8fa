"""Adversarial attention heads, seeded: the shapes on which a certificate with a wrong constant would fail.

`FAMILIES[name](S, H, seed)` makes one; its last tokens are ordinary, so any window may be taken as exact.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Family(NamedTuple):
    """One query head: query [H], keys [S, H], values [S, H], float32, and scores [S] = keys · query / √H in float64."""

    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    scores: np.ndarray


def _family(rng: np.random.Generator, scores: np.ndarray, values: np.ndarray, spread: float = 0.3) -> Family:
    """Keys that give these scores, up to float32, with a random part orthogonal to the query."""
    S, H = values.shape
    query = rng.normal(size=H)
    unit = query / np.linalg.norm(query)
    noise = spread * rng.normal(size=(S, H))
    keys = noise - np.outer(noise @ unit, unit) + np.outer(scores * np.sqrt(H) / np.linalg.norm(query), unit)
    return _from_arrays(query, keys, values)


def _from_arrays(query: np.ndarray, keys: np.ndarray, values: np.ndarray) -> Family:
    query, keys, values = (x.astype(np.float32) for x in (query, keys, values))
    return Family(query, keys, values, keys.astype(np.float64) @ query.astype(np.float64) / np.sqrt(query.size))


def peaked(S: int, H: int, seed: int = 0) -> Family:
    """Few keys hold most of the mass."""
    rng = np.random.default_rng([1, seed])
    return _family(rng, rng.normal(0, 3, S), rng.normal(size=(S, H)))


def flat(S: int, H: int, seed: int = 0) -> Family:
    """Nearly equal weights, and values with a common mean."""
    rng = np.random.default_rng([2, seed])
    return _family(rng, rng.normal(0, 0.1, S), rng.normal(size=(S, H)) + 0.5)


def equal_keys(S: int, H: int, seed: int = 0) -> Family:
    """All keys are the same key: every score is a tie."""
    rng = np.random.default_rng([3, seed])
    return _family(rng, np.full(S, 0.7), rng.normal(size=(S, H)), spread=0.0)


def huge_values(S: int, H: int, seed: int = 0) -> Family:
    """One key in twenty has a tiny weight and a huge value."""
    rng = np.random.default_rng([4, seed])
    rare = rng.random(S) < 0.05
    values = rng.normal(size=(S, H)) * np.where(rare, 300.0, 1.0)[:, None]
    return _family(rng, np.where(rare, -8.0, 0.0) + rng.normal(0, 0.5, S), values)


def cancelling(S: int, H: int, seed: int = 0) -> Family:
    """Pairs of equal keys with opposite large values: the output is near 0, M is not."""
    rng = np.random.default_rng([5, seed])
    pair, sign = np.arange(S) // 2, 1.0 - 2.0 * (np.arange(S) % 2)
    half = 10 * rng.normal(size=(S, H))
    return _family(rng, rng.normal(0, 1, S)[pair], sign[:, None] * half[pair], spread=0.0)


def one_key(S: int, H: int, seed: int = 0) -> Family:
    """One key of the pool has all the mass."""
    rng = np.random.default_rng([6, seed])
    scores = rng.normal(0, 1, S)
    scores[S // 3] = 18.0
    return _family(rng, scores, rng.normal(size=(S, H)))


def rank_one(S: int, H: int, seed: int = 0) -> Family:
    """Values ± one vector."""
    rng = np.random.default_rng([7, seed])
    axis = rng.normal(size=H)
    return _family(rng, rng.normal(0, 0.5, S), np.outer(1.0 - 2.0 * (np.arange(S) % 2), axis))


def pareto(S: int, H: int, seed: int = 0) -> Family:
    """Norms of values with a heavy tail: Pareto with exponent 2.2."""
    rng = np.random.default_rng([8, seed])
    direction = rng.normal(size=(S, H))
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    return _family(rng, rng.normal(0, 1, S), direction * (1 + rng.pareto(2.2, S))[:, None])


def spikes(S: int, H: int, seed: int = 0) -> Family:
    """Values near 0, but one in a hundred is 100 long: most samples miss them."""
    rng = np.random.default_rng([9, seed])
    spike = rng.random(S) < 0.01
    spike[S // 2] = True
    return _family(rng, rng.normal(0, 0.3, S), rng.normal(size=(S, H)) * np.where(spike, 100.0, 0.01)[:, None])


def duplicates(S: int, H: int, seed: int = 0) -> Family:
    """Eight different tokens, repeated."""
    rng = np.random.default_rng([10, seed])
    keys, values = rng.normal(size=(8, H)), rng.normal(size=(8, H))
    token = rng.integers(0, 8, S)
    return _from_arrays(rng.normal(size=H), keys[token], values[token])


def outliers(S: int, H: int, seed: int = 0) -> Family:
    """A few channels of keys and values are 30 times the rest."""
    rng = np.random.default_rng([11, seed])
    gain = np.where(np.arange(H) % 16 == 0, 30.0, 1.0)
    # The query is small there, so the scores stay those of a real head.
    return _from_arrays(rng.normal(size=H) / gain, rng.normal(size=(S, H)) * gain, rng.normal(size=(S, H)) * gain)


FAMILIES: dict[str, Callable[..., Family]] = {
    function.__name__: function
    for function in (
        peaked,
        flat,
        equal_keys,
        huge_values,
        cancelling,
        one_key,
        rank_one,
        pareto,
        spikes,
        duplicates,
        outliers,
    )
}
