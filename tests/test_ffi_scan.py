"""The scan's upper bounds: never below a perturbed score, and not loose."""

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized

from certjax import _ffi, perturbation, quantization, reference
from certjax.cache import from_storage
from certjax.types import Config
from tests.shared.certified_cases import append_all, assert_same_results
from tests.shared.ffi_cases import ARRAYS, LEVELS, make_cache, make_query, make_tokens


class ScanCase(NamedTuple):
    dtype: str
    head_dim: int
    group: int
    keys: str = "ordinary"
    query_scale: float = 1.0
    window: int = 64
    sinks: int = 0
    span: int = 0


ORDINARY = (
    ScanCase("float32", 16, 1),
    ScanCase("bfloat16", 128, 4, "channels", window=0),
    ScanCase("float16", 80, 3, window=17, sinks=5),
    ScanCase("float32", 256, 16, span=250),
    ScanCase("float32", 96, 5, "outliers", sinks=70, window=33),
    ScanCase("float16", 64, 2, "sixty"),
    ScanCase("bfloat16", 192, 7, "channels", 8.0, span=300, sinks=70),
    ScanCase("float32", 64, 2, "denormal"),
    ScanCase("float32", 64, 2, "denormal", 1e-30),
    ScanCase("float32", 48, 2, "equal"),
)
EXTREME = (
    ScanCase("float32", 64, 2, "ordinary", 1e4),
    ScanCase("float32", 64, 3, "1e3", 1e3),
    ScanCase("float32", 16, 2, "1e10", 1e10),
    ScanCase("float32", 64, 2, "1e18", 1e16),
    ScanCase("bfloat16", 32, 2, "1e30", 1.0),
    ScanCase("float16", 128, 4, "sixty", 1e3),
)
LENGTHS = (384, 301)


def _setup(case: ScanCase, seed: int):
    rng = np.random.default_rng(seed)
    cache = make_cache(rng, head_dim=case.head_dim, capacity=384, dtype=case.dtype)
    keys, values = make_tokens(rng, cache, 384)  # "channels": of very different sizes
    plain = rng.standard_normal(keys.shape)
    match case.keys:
        case "channels":
            plain = None
        case "outliers":
            plain[..., ::7] *= 100
        case "sixty":
            plain = 60 * np.sign(plain)
        case "denormal":
            plain = plain * 1e-41
        case "equal":
            plain[:] = plain[:1]
        case "ordinary":
            pass
        case factor:
            plain = plain * float(factor)
    if plain is not None:
        keys = jnp.asarray(plain, jnp.float32)
        if case.dtype != "float32":
            keys = jax.lax.bitcast_convert_type(keys.astype(case.dtype), cache.key.dtype)
    cache = append_all(cache, keys, values, jnp.asarray(LENGTHS, jnp.int32))
    words = perturbation.row_words(jax.random.key(seed), 2, 2)
    return jnp.float32(case.query_scale) * make_query(rng, cache, case.group), cache, words


def _scan(case, query, cache, words, isa=None):
    upper, reference_score = _ffi.scan(
        query, cache, words, window=case.window, sinks=case.sinks, span=case.span, isa=isa
    )
    return np.asarray(upper), np.asarray(reference_score)


def _scan_on_every_level(case, query, cache, words):
    """The scan's results, which have the same bits on every level."""
    scalar = _scan(case, query, cache, words, "scalar")
    for level in LEVELS:
        assert_same_results(_scan(case, query, cache, words, level), scalar)
    return scalar


def _perturbed(query, cache, words):
    """s and E in float64."""
    key = np.asarray(from_storage(cache.key, cache.dtype), np.float64)
    noise = np.asarray(perturbation.exponentials(words, cache.capacity), np.float64)[:, :, None]
    return np.einsum("bkgh,bksh->bkgs", np.asarray(query, np.float64), key), noise


def _pool(case, cache):
    config = Config(window=case.window, sinks=case.sinks, attention_span=case.span or None)
    return np.broadcast_to(reference.masks(cache, config)[0], (2, 2, case.group, cache.capacity))


class ScanTest(chex.TestCase):
    @parameterized.parameters(*ORDINARY)
    def test_bounds_hold_and_are_tight(self, *case):
        case = ScanCase(*case)
        query, cache, words = _setup(case, 1)
        score, noise = _perturbed(query, cache, words)
        pool = _pool(case, cache)
        upper, reference_score = _scan_on_every_level(case, query, cache, words)
        np.testing.assert_array_equal(upper[~pool], -np.inf)
        bound = upper + reference_score[..., None].astype(np.float64)
        self.assertTrue((bound >= score + noise)[pool].all())
        # Against the definition: −ln U by a line from above (0.06) and the rounding up to float16. A channel whose int8
        # query is a tie may be rounded the other way, which the half-width covers on both sides.
        lowered = jax.jit(quantization.score_bounds).lower(query, cache)
        compiled = lowered.compile({"xla_backend_optimization_level": "0"})
        estimate, half_width = (np.asarray(x, np.float64) for x in compiled(query, cache))
        slack = (bound - (estimate + half_width + noise))[pool] - np.abs(upper[pool]) * 2.0**-10
        self.assertLess(slack.max(), 0.065 + 1e-3 * np.abs(half_width[pool]).max())
        self.assertLess(slack.mean(), 0.05)

    @parameterized.parameters(*EXTREME)
    def test_bounds_hold_at_extreme_magnitudes(self, *case):
        case = ScanCase(*case)
        query, cache, words = _setup(case, 2)
        score, noise = _perturbed(query, cache, words)
        pool = _pool(case, cache)
        upper, reference_score = _scan_on_every_level(case, query, cache, words)
        np.testing.assert_array_equal(upper[~pool], -np.inf)
        top = reference_score[..., None].astype(np.float64)
        # The filter has a margin for this rounding: 1e-6 of |c| + |reference|.
        self.assertFalse((upper + top < score + noise - 5e-7 * np.abs(top))[pool].any())

    def test_the_reference_is_the_largest_score_of_the_window(self):
        case = ScanCase("float32", 32, 3, sinks=2)
        query, cache, words = _setup(case, 4)
        score, _ = _perturbed(query, cache, words)
        index, length = np.arange(cache.capacity), np.asarray(cache.length)[:, None, None, None]
        window = ~_pool(case, cache) & (index < length)
        expected = np.where(window, score, -np.inf).max(-1)
        np.testing.assert_allclose(_scan(case, query, cache, words)[1], expected, rtol=1e-5)

    def test_rows_without_a_pool_and_bad_rows(self):
        case = ScanCase("float32", 32, 3)
        query, cache, words = _setup(case, 5)
        for length, valid, spoil, upper, top in (
            (0, True, 0.0, -np.inf, 0.0),
            (127, True, 0.0, -np.inf, 0.0),
            (-1, True, 0.0, np.nan, np.nan),
            (385, True, 0.0, np.nan, np.nan),
            (384, False, 0.0, np.nan, np.nan),
            (384, True, np.nan, np.nan, np.nan),
        ):
            row = dataclasses.replace(cache, length=cache.length.at[0].set(length), valid=cache.valid.at[0].set(valid))
            got = _scan(case._replace(window=127), query.at[0, 1, 2, 3].add(spoil), row, words)
            np.testing.assert_array_equal(got[0][0], upper)
            np.testing.assert_array_equal(got[1][0], top)
            self.assertTrue(np.isfinite(got[1][1]).all())

    def test_wrong_arguments(self):
        query, cache, words = _setup(ScanCase("float32", 32, 3), 6)
        for message, call in (
            ("query must be", lambda: _ffi.scan(query[0], cache, words)),
            ("query must be float32", lambda: _ffi.scan(query[:1], cache, words)),
            ("words must be uint32", lambda: _ffi.scan(query, cache, words.astype(jnp.int32))),
            ("at least 0: got -1, 0, 0", lambda: _ffi.scan(query, cache, words, window=-1)),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        for name in (name for name in ARRAYS if name != "key"):
            x = getattr(cache, name)
            for wrong in (x[..., :-1], jnp.zeros(x.shape, jnp.int16)):
                with pytest.raises(jax.errors.JaxRuntimeError, match=f"{name} has another dtype or shape"):
                    jax.block_until_ready(_ffi.scan(query, dataclasses.replace(cache, **{name: wrong}), words))

    def test_vmap(self):
        query, cache, words = _setup(ScanCase("float32", 32, 3), 7)
        together = _ffi.scan(query, cache, words)
        mapped = jax.vmap(_ffi.scan)(*jax.tree.map(lambda x: x[:, None], (query, cache, words)))
        chex.assert_trees_all_equal(jax.tree.map(lambda x: x[:, 0], mapped), together)
