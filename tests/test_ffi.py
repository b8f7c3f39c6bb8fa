"""The extension's calls under every transform and any number of threads, and how it loads."""

import dataclasses
import re
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from certjax import _ffi, isa
from certjax.cache import init_cache
from tests.shared.ffi_cases import (
    ARRAYS,
    assert_same_bits,
    make_cache,
    make_query,
    make_tokens,
    on_one_and_two_cpus,
)


class TransformTest(chex.TestCase):
    """Both calls together: append, then attend."""

    def setUp(self):
        super().setUp()
        rng = np.random.default_rng(10)
        self.cache = make_cache(rng, length=62)
        self.keys, self.values = make_tokens(rng, self.cache, 4)
        self.query = make_query(rng, self.cache, 3)
        self.on = jnp.ones(2, bool)

    def step(self, cache, i):
        cache = _ffi.append(cache, self.keys[i], self.values[i], self.on)
        return cache, _ffi.dense_decode(self.query, cache)

    def one_by_one(self):
        cache, outs = self.cache, []
        for i in range(4):
            cache, out = self.step(cache, i)
            outs.append(out)
        return cache, jax.tree.map(lambda *x: jnp.stack(x), *outs)

    def test_scan_and_cond(self):
        expected = self.one_by_one()

        def maybe(cache, i):
            def skip(cache):
                return (cache, (jnp.zeros(self.query.shape), jnp.zeros(self.query.shape[:3])))

            return jax.lax.cond(i < 9, lambda cache: self.step(cache, i), skip, cache)

        cache, outs = jax.jit(lambda cache: jax.lax.scan(maybe, cache, jnp.arange(4)))(self.cache)
        assert_same_bits(cache, expected[0])
        chex.assert_trees_all_equal(outs, expected[1])

    def test_two_equal_calls_in_one_program(self):
        def twice(cache):
            cache = _ffi.append(cache, self.keys[0], self.values[0], self.on)
            return _ffi.append(cache, self.keys[0], self.values[0], self.on)

        np.testing.assert_array_equal(jax.jit(twice)(self.cache).length, [64, 64])

    @chex.variants(with_jit=True, without_jit=True)
    def test_vmap(self):
        many = jax.tree.map(lambda x: jnp.stack([x, x]), self.cache)
        many = dataclasses.replace(many, length=many.length.at[1].set(5))

        def both(cache, key, value, query, on):
            cache = _ffi.append(cache, key, value, on)
            return cache, _ffi.dense_decode(query, cache)

        rows = [jax.tree.map(lambda x, i=i: x[i], many) for i in (0, 1)]
        loop = [both(row, self.keys[i], self.values[0], self.query, self.on) for i, row in enumerate(rows)]
        expected = jax.tree.map(lambda *x: jnp.stack(x), *loop)
        mapped = jax.vmap(both, in_axes=(0, 0, None, None, None))
        got = self.variant(mapped)(many, self.keys[:2], self.values[0], self.query, self.on)
        assert_same_bits(got[0], expected[0])
        chex.assert_trees_all_equal(got[1], expected[1])
        nested = jax.vmap(mapped, in_axes=(None, None, None, 0, None))
        queries = jnp.stack([self.query, -self.query])
        got = self.variant(nested)(many, self.keys[:2], self.values[0], queries, self.on)
        chex.assert_trees_all_equal(got[1][0][0], expected[1][0])
        assert_same_bits(jax.tree.map(lambda x: x[1], got[0]), expected[0])

    def test_shard_map_over_heads(self):
        mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
        axes = {name: P() if name in ("length", "valid") else P(None, "heads") for name in ARRAYS}
        spec = dataclasses.replace(self.cache, **axes)

        def both(cache, key, value, query, on):
            cache = _ffi.append(cache, key, value, on)
            result = _ffi.dense_decode(query, cache)
            # Each shard has decided for its own heads: make the rows agree.
            length = jax.lax.pmax(cache.length, "heads")
            valid = jax.lax.pmin(cache.valid.astype(jnp.int32), "heads") > 0
            return dataclasses.replace(cache, length=length, valid=valid), result

        heads = P(None, "heads")
        sharded = jax.jit(
            jax.shard_map(both, mesh=mesh, in_specs=(spec, heads, heads, heads, P()), out_specs=(spec, heads))
        )
        args = (self.cache, self.keys[0], self.values[0], self.query, self.on)
        got = sharded(*args)
        assert "all-gather" not in sharded.lower(*args).compile().as_text()
        expected = self.step(self.cache, 0)
        assert_same_bits(got[0], expected[0])
        chex.assert_trees_all_equal(got[1], expected[1])

    def test_no_rows(self):
        empty = jax.tree.map(lambda x: x[:0], self.cache)
        new = _ffi.append(empty, self.keys[0, :0], self.values[0, :0], self.on[:0])
        assert new.key.shape == (0, 2, 192, 32)
        out, lse = _ffi.dense_decode(self.query[:0], new)
        assert (out.shape, lse.shape) == ((0, 2, 3, 32), (0, 2, 3))

    def test_debug_nans_mode(self):
        expected = self.step(self.cache, 0)
        with jax.debug_nans(True):
            got = self.step(self.cache, 0)
            broken = dataclasses.replace(self.cache, valid=jnp.zeros(2, bool))
            with pytest.raises(FloatingPointError):
                jax.block_until_ready(_ffi.dense_decode(self.query, broken))
        assert_same_bits(got[0], expected[0])
        chex.assert_trees_all_equal(got[1], expected[1])

    def test_traced_once(self):
        chex.clear_trace_counter()
        step = jax.jit(chex.assert_max_traces(lambda cache, i: self.step(cache, i), n=1))
        cache = self.cache
        for i in range(3):
            cache, _ = step(cache, jnp.asarray(i))
        np.testing.assert_array_equal(cache.length, [65, 65])


CONCURRENT = """
import dataclasses, hashlib
import jax, jax.numpy as jnp, numpy as np
from certjax import _ffi, isa
from certjax.cache import init_cache
cache = init_cache(batch=1, kv_heads=4, head_dim=64, capacity=8192, dtype="float32")
key = jax.random.normal(jax.random.key(0), cache.key.shape)
cache = dataclasses.replace(cache, key=key, value=key, length=jnp.asarray([8000], jnp.int32))
queries = jax.random.normal(jax.random.key(1), (24, 1, 4, 2, 64))
many = jax.jit(lambda qs: [_ffi.dense_decode(q, cache)[0] for q in qs])
out = jnp.stack(many(list(queries)))
print(hashlib.sha256(np.asarray(out).tobytes()).hexdigest(), _ffi.thread_count())
"""


def test_many_calls_on_one_and_two_threads():
    """Neither hangs, and the results have the same bits whatever the number of threads."""
    (one, threads), (two, more) = on_one_and_two_cpus(CONCURRENT)
    assert one == two
    assert min(int(threads), int(more)) >= 1


def test_a_missing_extension_keeps_its_reason(monkeypatch):
    monkeypatch.setitem(sys.modules, "certjax._native", None)
    native, reason = _ffi._load()
    assert native is None
    assert "certjax._native cannot be imported" in reason
    monkeypatch.setattr(_ffi, "_native", None)
    monkeypatch.setattr(_ffi, "_reason", reason)
    assert _ffi.is_available() == (False, reason)
    assert _ffi.isa_levels() == ()
    cache = init_cache(batch=1, kv_heads=1, head_dim=16, capacity=64)
    with pytest.raises(ImportError, match="cannot be imported"):
        _ffi.dense_decode(jnp.zeros((1, 1, 1, 16)), cache)


def test_a_runtime_older_than_the_headers_is_named(monkeypatch):
    monkeypatch.setattr(_ffi, "_runtime_version", lambda: (0, 0))
    native, reason = _ffi._load()
    assert native is None
    assert re.search(r"built for XLA FFI 0\.\d+, the installed jaxlib has 0\.0: upgrade jaxlib", reason)


def test_the_machine_is_described():
    assert _ffi.is_available() == (True, "")
    assert _ffi._runtime_version() >= _ffi.build_info()["ffi_api_version"]
    assert _ffi.thread_count() >= 1
    assert isa.huge_pages() in ("always", "madvise", "never", "unknown")
