"""Ragged batches of adversarial heads for the certified step, and its two implementations side by side."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from certjax import _ffi, perturbation, reference
from certjax.cache import init_cache, to_storage
from certjax.types import Config, Hint, init_hint
from tests.shared.families import FAMILIES

FIELDS = (
    *("certified", "exact", "error_bound", "level", "threshold", "keys_read", "candidates", "bytes_read"),
    *("log_normalizer", "value_scale_lower"),
)
SENSELESS = (-1.0, 0.0, 2.4, 5.0, 1e9, np.nan, np.inf, -np.inf)  # hints


class Case(NamedTuple):
    """One program of each implementation; seeds, epsilons and hints are operands."""

    dtype: str = "float32"
    head_dim: int = 16
    group: int = 2
    options: tuple[tuple[str, Any], ...] = ()  # of Config, beside always_sample=True
    lengths: tuple[int, ...] = (4096, 3999, 37, 0)
    kv_heads: int = 2

    def config(self, epsilon=0.2, delta=0.1) -> Config:
        options = {"always_sample": True} | dict(self.options)
        return Config(epsilon=jnp.float32(epsilon), delta=jnp.float32(delta), **options)


@functools.partial(jax.jit, donate_argnums=0)
def append_all(cache, key, value, lengths):
    """Appends tokens [T, B, K, H] in the storage dtype, to row b the first lengths[b]. Compiled once a shape."""

    def body(i, cache):
        return _ffi.append(cache, key[i], value[i], i < lengths)

    return jax.lax.fori_loop(0, key.shape[0], body, cache)


def draw(case: Case, seed: int, value_size: float = 1.0):
    """(query [B, K, G, H], cache, words, family of each row and kv head): another family in every kv head.

    The heads of a group have queries of different lengths around the family's; the calibration is not the default.
    """
    rng = np.random.default_rng(seed)
    B, K, G, H = len(case.lengths), case.kv_heads, case.group, case.head_dim
    S = -(-max(case.lengths) // 64) * 64
    key, value = np.zeros((2, B, K, S, H), np.float32)
    query = np.zeros((B, K, G, H))
    families = np.roll(sorted(FAMILIES), -4 * seed)
    names = [[families[(b * K + k) % len(families)] for k in range(K)] for b in range(B)]
    for b, k in np.ndindex(B, K):
        family = FAMILIES[names[b][k]](S, H, seed)
        key[b, k], value[b, k] = family.keys, family.values * value_size
        tilt = rng.uniform(0.5, 1.1, (G, 1)) * (1 + 0.1 * rng.normal(size=(G, H)))
        query[b, k] = family.query / np.sqrt(H) * tilt
    shape = (B, K, H)
    cache = dataclasses.replace(
        init_cache(batch=B, kv_heads=K, head_dim=H, capacity=S, dtype=case.dtype),
        channel_weight=jnp.asarray(np.exp(0.5 * rng.standard_normal(shape)), jnp.float32),
        channel_order=jnp.asarray(rng.permuted(np.broadcast_to(np.arange(H), shape), axis=-1), jnp.int32),
        value_center=jnp.asarray(value.mean(2)),
    )
    rows = [jnp.moveaxis(to_storage(jnp.asarray(x), case.dtype), 2, 0) for x in (key, value)]
    cache = append_all(cache, *rows, jnp.asarray(case.lengths, jnp.int32))
    return jnp.asarray(query, jnp.float32), cache, perturbation.row_words(jax.random.key(seed), B, K), names


def hints(case: Case, seed: int) -> Hint:
    """Mostly nothing known, else senseless levels; one kv head in eight waits, by one of its query heads."""
    rng = np.random.default_rng(seed)
    shape = (len(case.lengths), case.kv_heads, case.group)
    wait = np.zeros(shape, np.int32)
    wait[..., -1] = (rng.random(shape[:2]) < 1 / 8) * rng.integers(1, 2**31 - 1, shape[:2])
    level = np.where(rng.random(shape) < 0.7, -1.0, rng.choice(SENSELESS, shape))
    return Hint(jnp.asarray(level, jnp.float32), jnp.asarray(wait))


def no_hint(case: Case) -> Hint:
    hint = init_hint(batch=len(case.lengths), heads=case.kv_heads * case.group)
    return jax.tree.map(lambda x: x.reshape(len(case.lengths), case.kv_heads, case.group), hint)


@functools.cache
def _reference(case: Case):
    query, cache, words, _ = draw(case, 0)
    lowered = reference.decode.lower(query, cache, words, case.config(), hints(case, 0))
    # Three times as fast to compile; nothing here needs a fast program.
    return lowered.compile(compiler_options={"xla_backend_optimization_level": "0"})


def run_both(case: Case, query, cache, words, epsilon: float, hint: Hint):
    """(output, certificate, hint) of the definition and of the extension, as numpy."""
    args = (query, cache, words, case.config(epsilon), hint)
    return tuple(jax.tree.map(np.asarray, run(*args)) for run in (_reference(case), _ffi.certified_decode))


def assert_same_step(case: Case, cache, expected, got) -> tuple[int, int]:
    """The extension's step is the definition's, up to float32 rounding. Returns (sampled heads, heads with a tie).

    Rounding decides ties: keys at the threshold, and channels of the int8 query halfway between two integers (one step
    of code is exactly half the largest one), which move the predictions and so the threshold a little. Such a head
    reads a key or so more or less, at the same level.
    """
    output, c, hint = expected
    other, d, other_hint = got
    for name in ("level", "exact", "certified"):
        np.testing.assert_array_equal(getattr(d, name), getattr(c, name), err_msg=name)
    assert c.certified.all()
    exact = c.exact
    # ln τ is relative to the unit of the values, a power of two that each implementation takes for itself.
    np.testing.assert_array_equal(d.threshold[exact], -np.inf)
    difference = np.subtract(d.threshold, c.threshold, out=np.zeros(exact.shape, np.float64), where=~exact)
    units = np.round(difference / np.log(2))
    assert (np.abs(units) <= 1).all()
    difference = np.abs(difference - units * np.log(2))
    tie = (c.keys_read != d.keys_read) | (difference > 1e-4)
    assert (difference < 5e-3).all()
    assert (np.abs(c.keys_read - d.keys_read) <= 1 + c.keys_read // 200).all()
    sampled = ~exact & ~tie

    def close(name, mask, rtol=1e-4, atol=0.0):
        np.testing.assert_allclose(getattr(d, name)[mask], getattr(c, name)[mask], rtol=rtol, atol=atol, err_msg=name)

    for name in ("error_bound", "value_scale_lower"):
        close(name, sampled)
    close("log_normalizer", ~tie, atol=1e-5)
    np.testing.assert_allclose(other_hint.level[sampled], hint.level[sampled], atol=1e-3)
    same = (other_hint.level == hint.level) | np.isnan(hint.level) & np.isnan(other_hint.level)
    assert (same | (other_hint.level == -1))[exact].all()
    np.testing.assert_array_equal(other_hint.wait[~tie], hint.wait[~tie])

    # What is read: the extension reads for the whole group, and its bounds are rounded up to float16.
    pool = np.asarray(reference.masks(cache, case.config())[0].sum(-1))  # [B, 1, 1]
    np.testing.assert_array_equal(d.keys_read[exact], np.broadcast_to(pool, exact.shape)[exact])
    np.testing.assert_array_equal(d.candidates[exact], c.candidates[exact])
    assert (d.candidates >= c.candidates)[~tie].all()
    assert (d.candidates <= pool).all()
    assert (d.keys_read <= d.candidates).all()
    some = np.broadcast_to(exact.any(-1, keepdims=True), exact.shape)
    close("bytes_read", some, rtol=1e-6)
    ratio = d.bytes_read[~some] / c.bytes_read[~some]
    assert ((ratio > 1 - 1e-6) & (ratio < 1.1)).all()

    # Outputs in units of M; subnormal numbers are zero in XLA.
    scale = np.maximum(c.value_scale_lower, np.max(np.abs(output), -1)).astype(np.float64)
    error = np.abs(output.astype(np.float64) - other).max(-1)
    assert (error[~tie] <= (1e-5 * scale + 1e-37)[~tie]).all()
    assert (error[tie] <= (c.error_bound + d.error_bound)[tie]).all()
    length = np.linalg.norm(other.astype(np.float64), axis=-1)
    # M ≥ ‖o‖, less the rounding of float32 scores and sums.
    assert (d.value_scale_lower[exact] <= length[exact] * (1 - 9e-6) + 1e-44).all()
    assert (d.value_scale_lower[exact] >= length[exact] * 0.99 - 1e-44).all()
    known = exact & (c.value_scale_lower > 1e-37)
    assert (d.value_scale_lower <= c.value_scale_lower * (1 + 1e-5))[known].all()
    return int(sampled.sum()), int(tie.sum())


def assert_same_results(a, b):
    """Two results (output, certificate, hint) with the same bits in every field."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(x.view(f"u{x.itemsize}"), y.view(f"u{y.itemsize}"))
