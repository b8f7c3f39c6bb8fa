"""The reduction of inner products to distances is exact."""

import chex
import numpy as np

from certjax.retrieval import xbox


class XboxTest(chex.TestCase):
    def test_distances_order_as_inner_products(self):
        rng = np.random.default_rng(0)
        points = rng.normal(size=(200, 6)) * np.exp(rng.normal(size=(200, 1)) * 2)  # norms spread 100 times
        queries = rng.normal(size=(5, 6)) * 7
        bound = xbox.largest_norm(points)
        lifted, asked = xbox.lift(points, bound), xbox.lift_queries(queries, bound)
        np.testing.assert_allclose(np.linalg.norm(lifted, axis=1), bound, rtol=1e-6)
        np.testing.assert_allclose(np.linalg.norm(asked, axis=1), bound, rtol=1e-6)
        distance = ((asked[:, None].astype(float) - lifted) ** 2).sum(-1)
        inner = queries @ points.T / np.linalg.norm(queries, axis=1, keepdims=True)
        np.testing.assert_allclose(2 * bound**2 - distance, 2 * bound * inner, atol=1e-5 * bound**2)

    def test_zeros(self):
        assert xbox.largest_norm(np.zeros((3, 2))) == 1
        assert np.isfinite(xbox.lift_queries(np.zeros((1, 2), np.float32), 1.0)).all()
