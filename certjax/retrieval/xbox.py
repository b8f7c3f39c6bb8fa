"""Maximum inner product as nearest neighbour, exactly, for libraries whose indexes are sound for L2 alone.

With M ≥ every ‖x‖, the points (x, √(M² − ‖x‖²)) all have norm M, and ‖(q, 0) − x̃‖² = ‖q‖² + M² − 2 q·x: the order of
distances is that of inner products (Bachrach et al., "Speeding up the Xbox recommender system using a Euclidean
transformation for inner-product spaces", 2014, section 4.2). A graph over raw inner products is not navigable.
"""

import numpy as np

SLACK = 1.25  # of M over the largest norm after a rebuild, so that few appended keys need one


def lift(points: np.ndarray, bound: float) -> np.ndarray:
    """Points [n, D] of norms at most `bound` to float32 [n, D + 1]."""
    points = np.asarray(points, np.float64)
    rest = np.sqrt(np.maximum(bound**2 - (points**2).sum(-1, keepdims=True), 0))
    return np.concatenate([points, rest], -1).astype(np.float32)


def lift_queries(queries: np.ndarray, bound: float) -> np.ndarray:
    """Queries [G, D] to float32 [G, D + 1] of norm `bound`: their length does not matter to the order of the points,
    but does to the order of the means that a partition compares with first.
    """
    norm = np.linalg.norm(np.asarray(queries, np.float64), axis=-1, keepdims=True)
    scaled = queries * (bound / np.where(norm > 0, norm, 1))
    return np.concatenate([scaled, np.zeros_like(scaled[:, :1])], -1).astype(np.float32)


def largest_norm(points: np.ndarray) -> float:
    """M of points [n, D]; 1 where all are zero."""
    return float(np.linalg.norm(np.asarray(points, np.float64), axis=-1).max(initial=0)) or 1.0
