"""One suite over every oracle; the exact ones are exact, and the others find most."""

import os
import subprocess
import sys

import chex
import numpy as np
import pytest
from absl.testing import parameterized

from certjax import retrieval
from certjax.retrieval import oracles

rng = np.random.default_rng(0)
POINTS = rng.normal(size=(1000, 8)).astype(np.float32) * np.exp(rng.normal(size=(1000, 1)) / 2).astype(np.float32)
QUERIES = rng.normal(size=(400, 8)).astype(np.float32)

ORACLES = {
    "flat": (None, retrieval.Flat(), 1.0),
    "faiss_flat": ("faiss", retrieval.FaissFlat(), 1.0),
    "ivf": ("faiss", retrieval.IVF(), 0.9),
    "hnsw": ("faiss", retrieval.HNSW(m=16, ef_construction=100), 0.9),
    "nsg": ("faiss", retrieval.NSG(degree=16, neighbors=32), 0.9),
    "mlann": (None, retrieval.MLANN(), 0.8),
    "pipnn": ("pipnn", retrieval.PiPNN(fanout=3, threads=1), 0.9),
}


def make(name):
    module, oracle, recall = ORACLES[name]
    if module:
        pytest.importorskip(module, reason=f"{module} is missing: pip install 'certjax[oracles]'")
    return oracle, recall


def truth(points, queries, k):
    return np.argsort(-(queries @ points.T), axis=1)[:, :k]


def recall(found, points, queries, k):
    want = truth(points, queries, k)
    return np.mean([len(set(a) & set(b)) / want.shape[1] for a, b in zip(found, want, strict=True)])


class OracleTest(chex.TestCase):
    @parameterized.product(name=list(ORACLES))
    def test_finds_the_largest_inner_products(self, name):
        oracle, least = make(name)
        searcher = oracle.build(POINTS, QUERIES[100:])
        found = searcher.search(QUERIES[:20], 32)
        assert found.shape == (20, 32)
        assert found.dtype == np.int32
        for row in found:
            valid = row[row >= 0]
            assert len(set(valid)) == len(valid)
            assert (valid < len(POINTS)).all()
        assert recall(found, POINTS, QUERIES[:20], 32) >= least
        np.testing.assert_array_equal(found, searcher.search(QUERIES[:20], 32))

    @parameterized.product(name=list(ORACLES), n=(1, 3, 70))
    def test_few_points(self, name, n):
        oracle, _ = make(name)
        found = oracle.build(POINTS[:n], QUERIES[100:]).search(QUERIES[:2], 100)
        assert found.shape == (2, 100)
        for row in found:
            np.testing.assert_array_equal(np.sort(row), np.r_[np.full(100 - n, -1), np.arange(n)])

    @parameterized.product(name=list(ORACLES))
    def test_append(self, name):
        oracle, least = make(name)
        searcher = oracle.build(POINTS[:700], QUERIES[100:])
        if name == "nsg":
            with pytest.raises(NotImplementedError, match="NSG cannot grow: keep new keys in the window"):
                searcher.append(POINTS[700:])
            return
        louder = 3 * POINTS[700:]  # beyond the largest norm of the build: the reduction must be made anew
        searcher.append(louder[:100])
        searcher.append(louder[100:])
        points = np.concatenate([POINTS[:700], louder])
        found = searcher.search(QUERIES[:20], 32)
        assert recall(found, points, QUERIES[:20], 32) >= least

    @parameterized.product(name=list(ORACLES))
    def test_duplicates(self, name):
        oracle, _ = make(name)
        points = np.repeat(POINTS[:12], 50, axis=0)
        found = oracle.build(points, QUERIES[100:]).search(QUERIES[:4], 40)
        for query, row in zip(QUERIES, found, strict=False):
            valid = row[row >= 0]
            assert len(set(valid)) == len(valid) > 0
            assert (points[valid[0]] @ query) >= (points @ query).max() - 1e-3

    @parameterized.product(name=("faiss_flat", "ivf", "hnsw", "pipnn"), spread=(1, 300))
    def test_appended_copies(self, name, spread):
        oracle, least = make(name)
        base, copies = POINTS[:300], np.resize(POINTS[:spread], (1500, 8))
        searcher = oracle.build(base, QUERIES[100:])
        for fresh in (copies[:700], POINTS[300:400], copies[700:], POINTS[400:600]):
            searcher.append(fresh)
        points = np.concatenate([base, copies[:700], POINTS[300:400], copies[700:], POINTS[400:600]])
        hits = 0
        for query, row in zip(QUERIES[:20], searcher.search(QUERIES[:20], 32), strict=True):
            scores, valid = points @ query, row[row >= 0]
            assert len(set(valid)) == len(valid)
            hits += (scores[valid] >= np.sort(scores)[-32] - 1e-4).sum()
        assert hits >= least * 20 * 32

    @parameterized.product(name=list(ORACLES))
    def test_queries_that_are_not_finite(self, name):
        oracle, _ = make(name)
        searcher = oracle.build(POINTS, QUERIES[100:])
        queries = QUERIES[:3].copy()
        queries[0, 1], queries[2, 3] = np.nan, -np.inf
        found = searcher.search(queries, 8)
        np.testing.assert_array_equal(found[1:2], searcher.search(queries[1:2], 8))
        if name != "flat":
            np.testing.assert_array_equal(found[::2], -1)

    def test_best_and_clean(self):
        scores = np.array([[1.0, 5.0, 3.0]])
        np.testing.assert_array_equal(oracles.best(scores, np.array([7, 8, 9]), 2), [[8, 9]])
        np.testing.assert_array_equal(oracles.best(scores[:, :0], np.empty(0, int), 2), [[-1, -1]])
        found = np.array([[3, 3, 2**32 - 1, 9, -1, 0]])
        np.testing.assert_array_equal(oracles.clean(found, 5, 4), [[3, 0, -1, -1]])

    def test_jnp_search_is_the_same(self):
        want = retrieval.Flat().build(POINTS).search(QUERIES[:3], 10)
        np.testing.assert_array_equal(oracles.search(POINTS, QUERIES[:3], 10), want)
        np.testing.assert_array_equal(oracles.search(POINTS[:2], QUERIES[:3], 4)[:, 2:], -1)


def test_threads_of_faiss_do_not_spin(tmp_path):
    """OpenMP reads its environment when FAISS is loaded, here a module that keeps what it would read."""
    (tmp_path / "faiss.py").write_text("import os\npolicy = os.environ.get('OMP_WAIT_POLICY')")
    script = "from certjax.retrieval import faiss_oracles; print(faiss_oracles.import_faiss().policy)"
    for chosen in (None, "ACTIVE"):
        env = {name: x for name, x in os.environ.items() if name != "OMP_WAIT_POLICY"} | {"PYTHONPATH": str(tmp_path)}
        env |= {} if chosen is None else {"OMP_WAIT_POLICY": chosen}
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == (chosen or "PASSIVE")


def test_mlann_needs_queries():
    with pytest.raises(ValueError, match="MLANN is trained on queries: pass queries"):
        retrieval.MLANN().build(POINTS)


def test_missing_libraries_are_named(monkeypatch):
    for module, oracle in (("faiss", retrieval.IVF()), ("pipnn", retrieval.PiPNN())):
        monkeypatch.setitem(__import__("sys").modules, module, None)
        with pytest.raises(ImportError, match=r"is missing: pip install \"certjax\[oracles\]\""):
            oracle.build(POINTS)
