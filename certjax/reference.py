"""The whole certified step in jnp: `implementation="xla"`. The readable definition, and the oracle of the tests.

It reads every key and masks, so it is as slow as dense attention; what it reports as read is what an implementation
that skips would read. Cost: O(B N S H) plus O(B N S) per level evaluated; memory O(B N S).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from certjax import cost, estimator, levels
from certjax.cache import from_storage
from certjax.certificate import TINY
from certjax.perturbation import exponentials
from certjax.quantization import from_bf16_bits, norm_up, score_bounds
from certjax.types import BLOCK, Certificate, Config, Hint, KVCache


class State(NamedTuple):
    """Loop over levels; fields [B, K, G] unless said otherwise."""

    level: jax.Array
    running: jax.Array
    certified: jax.Array
    center: jax.Array  # ô − c0, [B, K, G, H]
    denominator: jax.Array
    bound: jax.Array
    scale_lower: jax.Array
    sufficient: jax.Array
    expected: jax.Array  # sample of the level that comes next; of the last one where certified


def masks(cache: KVCache, config: Config) -> tuple[jax.Array, jax.Array]:
    """(pool, window), bool [B, 1, 1, S]: keys that may be sampled, and attended keys that are always read."""
    index = jnp.arange(cache.capacity)[None, :]
    length = cache.length[:, None]
    start = jnp.maximum(length - config.attention_span, 0) if config.attention_span else jnp.zeros_like(length)
    attended = (index >= start) & (index < length)
    end = jnp.minimum(length - config.window, length // BLOCK * BLOCK)
    pool = attended & (index >= config.sinks) & (index < end)
    return pool[:, None, None], (attended & ~pool)[:, None, None]


def exact_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """q·k in float32: [B, K, G, H] × [B, K, S, H] → [B, K, G, S]."""
    return jnp.einsum("bkgh,bksh->bkgs", query, key, precision="highest")


def dense(scores: jax.Array, attended: jax.Array, value: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Exact softmax attention over the attended keys.

    Returns:
      (output [B, K, G, H], log-normaliser [B, K, G], M² [B, K, G]); 0, −inf and 0 for rows without keys.
    """
    scores = jnp.where(attended, scores, -jnp.inf)
    top = scores.max(-1)
    top = jnp.where(jnp.isfinite(top), top, 0)
    weight = jnp.exp(scores - top[..., None])
    mass = estimator.total(weight)
    safe = jnp.maximum(mass, TINY)
    output = estimator.weighted_rows(weight, value) / safe[..., None]
    square = estimator.total(weight * (value * value).sum(-1)[:, :, None]) / safe
    return output, top + jnp.log(mass), square


@jax.jit  # as `decode`
def decode_exactly(query: jax.Array, cache: KVCache, config: Config) -> tuple[jax.Array, Certificate]:
    """Dense attention with the trivial certificate: as `decode`, [B, K, G, H] and [B, K, G]."""
    H, G = query.shape[-1], query.shape[2]
    pool, window = masks(cache, config)
    attended = pool | window
    clean = attended[:, :, 0, :, None]
    key, value = (jnp.where(clean, from_storage(x, cache.dtype), 0) for x in (cache.key, cache.value))
    output, log_normalizer, _ = dense(exact_scores(query, key), attended, value)
    usable = (cache.valid & jnp.isfinite(query).all((1, 2, 3)))[:, None, None]
    usable = usable & finite(query, cache, output, log_normalizer)  # [B, K, G]
    output = jnp.where(usable[..., None], output, jnp.nan)
    row_bytes = attended.sum(-1).astype(jnp.float32) * (2 * H * cache.key.dtype.itemsize) / G
    pool_keys = pool.sum(-1).astype(jnp.int32)
    everywhere = lambda x: jnp.broadcast_to(x, usable.shape)
    lower = jnp.maximum(1 - 2e-4 - _rounding(query, cache), 0)  # M ≥ ‖o‖; norm_up is at most 1e-4 too large
    return output, Certificate(
        certified=usable,
        exact=usable,
        error_bound=jnp.where(usable, jnp.float32(0), jnp.inf),
        level=everywhere(jnp.int32(-1)),
        threshold=everywhere(-jnp.inf),
        keys_read=everywhere(pool_keys),
        candidates=everywhere(pool_keys),
        bytes_read=everywhere(row_bytes),
        log_normalizer=jnp.where(usable, log_normalizer, jnp.nan),
        value_scale_lower=jnp.where(usable, norm_up(output) * lower, 0),
    )


def finite(query: jax.Array, cache: KVCache, output: jax.Array, log_normalizer: jax.Array) -> jax.Array:
    """Heads whose arithmetic did not overflow (bool [B, K, G]): of finite inputs scores and sums may be infinite."""
    scores = norm_up(query) * cache.key_norm_max[:, :, None] < 1e37  # so that no partial sum of one overflows
    return scores & jnp.isfinite(output).all(-1) & (log_normalizer < jnp.inf)


@jax.jit  # one program outside jit too; inlined inside
def decode(
    query: jax.Array, cache: KVCache, words: jax.Array, config: Config, hint: Hint
) -> tuple[jax.Array, Certificate, Hint]:
    """One certified step.

    Args:
      query: float32 [B, K, G, H], multiplied by the softmax scale.
      cache: KVCache.
      words: uint32 [B, K, 4] (perturbation.py).
      config: Config.
      hint: fields [B, K, G].

    Returns:
      (output float32 [B, K, G, H], Certificate [B, K, G], Hint [B, K, G]).
    """
    waiting = jnp.broadcast_to((hint.wait > 0).any(-1, keepdims=True), query.shape[:3]) & (not config.always_sample)
    usable = jnp.broadcast_to((cache.valid & jnp.isfinite(query).all((1, 2, 3)))[:, None, None], query.shape[:3])
    query = jnp.where(usable[..., None], query, 0)
    pool, window = masks(cache, config)
    attended = pool | window
    # Rows beyond the length hold whatever was there: 0 · NaN is NaN, so they are zeroed, not only masked.
    clean = attended[:, :, 0, :, None] & cache.valid[:, None, None, None]
    key = jnp.where(clean, from_storage(cache.key, cache.dtype), 0)
    value = jnp.where(clean, from_storage(cache.value, cache.dtype), 0)
    raw = exact_scores(query, key)
    unit = _unit(cache, attended)
    value = value / unit
    scores, c = _scores(query, cache, words, raw, pool, window)
    values = _values(cache, value, unit)
    state, prediction, log_size, count = _run_levels(query, cache, config, hint, scores, values, usable & ~waiting)

    exact = ~state.certified
    nothing = jnp.zeros(query.shape), jnp.zeros(query.shape[:3]), jnp.zeros(query.shape[:3])
    exact_output, log_normalizer, scale_squared = jax.lax.cond(
        exact.any(), lambda: dense(raw, attended, value), lambda: nothing
    )
    output = jnp.where(exact[..., None], exact_output, state.center + values.center) * unit
    sampled_normalizer = c + jnp.log(jnp.maximum(state.denominator, TINY))
    log_normalizer = jnp.where(exact, log_normalizer, sampled_normalizer)
    usable &= finite(query, cache, output, log_normalizer)
    output = jnp.where(usable[..., None], output, jnp.nan)
    log_tau = estimator.log_threshold(state.level, prediction.mass, jnp.asarray(config.epsilon, jnp.float32))
    reads = _reads(cache, scores, log_size, log_tau, exact, jnp.where(waiting, 0, count))
    bound = state.bound
    if config.measure != "denominator":
        # The radius is about the weights that are used; real arithmetic is a rounding away, relative to M ≤ max ‖v‖.
        largest = jnp.where(attended, values.size, 0).max(-1) + jnp.sqrt((values.center**2).sum(-1))
        bound = (bound + _rounding(query, cache) * largest + _center_rounding(cache, values)) * unit[..., 0]
    exact_lower = jnp.sqrt(scale_squared) * jnp.maximum(1 - 1e-5 - _rounding(query, cache), 0)
    scale_lower = jnp.where(exact, exact_lower, state.scale_lower) * unit[..., 0]
    result = Certificate(
        certified=usable,
        exact=exact & usable,
        error_bound=jnp.where(usable, jnp.where(exact, 0, bound), jnp.inf),
        level=jnp.where(exact, -1, state.level),
        threshold=jnp.where(exact, -jnp.inf, log_tau),
        **reads,
        log_normalizer=jnp.where(usable, log_normalizer, jnp.nan),
        value_scale_lower=jnp.where(usable & jnp.isfinite(scale_lower), scale_lower, 0),
    )
    next_hint = _next_hint(hint, waiting, state, pool, attended, result, count)
    if config.always_sample:
        next_hint = Hint(next_hint.level, jnp.zeros_like(hint.wait))
    return output, result, next_hint


def _next_hint(hint, waiting, state, pool, attended, result, count) -> Hint:
    """The level that was enough, and whether the kv head should be computed exactly for some steps."""
    size = lambda mask: mask.sum(-1)[..., 0]  # [B, 1]
    keys = result.keys_read.sum(-1)
    pays = cost.pays(size(attended), size(pool), keys) & ~result.exact.any(-1)
    tried = (count > 0).any(-1)
    wait = jnp.where(tried & ~pays & result.certified.any(-1), cost.WAIT, 0)[..., None]
    wait = jnp.where(waiting, jnp.maximum(hint.wait.max(-1, keepdims=True) - 1, 0), wait)
    wait = jnp.broadcast_to(wait, waiting.shape).astype(jnp.int32)
    return Hint(level=jnp.where(waiting, hint.level, state.sufficient), wait=wait)


def _unit(cache: KVCache, attended: jax.Array) -> jax.Array:
    """A power of two that is at least every ‖v‖ and ‖c0‖, [B, K, 1, 1]: in its units no square over- or underflows.

    1 where there is none in float32's comfortable range: such values never certify, and are computed exactly.
    """
    norm = jnp.where(attended, from_bf16_bits(cache.value_norm)[:, :, None], 0).max(-1, keepdims=True)
    largest = jnp.maximum(norm, norm_up(cache.value_center)[:, :, None, None])
    usable = (largest > 1e-30) & (largest < 1e30)
    return jnp.where(usable, jnp.exp2(jnp.ceil(jnp.log2(jnp.where(usable, largest, 1))) + 1), 1)


def _values(cache: KVCache, value: jax.Array, unit: jax.Array) -> levels.Values:
    """Values, already divided by `unit`, and what the certificate needs of them."""
    center = cache.value_center[:, :, None] / unit
    square = (value * value).sum(-1)[:, :, None]
    size, norm = (from_bf16_bits(x)[:, :, None] / unit for x in (cache.value_size, cache.value_norm))
    return levels.Values(value - center, center, square, size, norm)


def _scores(query, cache, words, raw, pool, window) -> tuple[estimator.Scores, jax.Array]:
    """Scores relative to c, and c [B, K, G]: a lower bound of the largest score, so that weights are not all tiny."""
    estimate, half_width = score_bounds(query, cache)
    # A clipped block may have an infinite half-width: a candidate at every level, never a NaN.
    known = pool & jnp.isfinite(estimate)
    surely = jnp.where(known, estimate - half_width, -jnp.inf).max(-1)
    top = jnp.maximum(surely, jnp.where(window, raw, -jnp.inf).max(-1))
    c = jnp.where(jnp.isfinite(top), top, 0)
    scores = estimator.Scores(
        exact=raw - c[..., None],
        estimate=jnp.where(known, estimate - c[..., None], -jnp.inf),
        half_width=jnp.where(known, half_width, jnp.inf),
        pool=pool,
        window=window,
        noise=exponentials(words, cache.capacity)[:, :, None],
    )
    return scores, c


def _run_levels(query, cache, config, hint, scores, values, usable):
    """Runs levels until every head is certified or sent to dense."""
    epsilon, delta = (jnp.asarray(x, jnp.float32) for x in (config.epsilon, config.delta))
    shape = query.shape[:3]
    norm_size = config.measure != "denominator"
    prediction = estimator.predict(scores, values.size, values.norm, values.square, norm_size)
    log_size = jnp.zeros_like(scores.exact)  # z = w
    if norm_size:
        log_size = 0.5 * jnp.log(values.size**2 + prediction.offset[..., None] ** 2)
    pool_keys = jnp.broadcast_to(scores.pool.sum(-1), shape)
    count = estimator.level_count(pool_keys, epsilon)
    wanted = jnp.where(jnp.isfinite(hint.level), jnp.round(hint.level - 1), 0)
    start = jnp.clip(wanted, 0, jnp.maximum(count - 1, 0).astype(jnp.float32)).astype(jnp.int32)
    rounding = _rounding(query, cache)
    budget = levels.Budget(
        tier="both" if config.bounds == "full" else "scalar",
        log_inverse=jnp.log(jnp.maximum(count, 1).astype(jnp.float32)) - jnp.log(delta),
        allowed=epsilon - rounding,
        rounding=rounding,
        center_rounding=_center_rounding(cache, values),
    )
    evaluate = levels.evaluate_output if norm_size else levels.evaluate_denominator
    attended = (scores.pool | scores.window).sum(-1)

    def go_on(running, certified, expected):
        return running if config.always_sample else cost.go_on(running, certified, expected, attended)

    def body(state: State) -> State:
        log_tau = estimator.log_threshold(state.level, prediction.mass, epsilon)
        drawn = estimator.sample(scores, log_size, log_tau)
        out = evaluate(config, budget, scores, values, prediction, log_size, log_tau, drawn)
        passed = state.running & (out.shortfall < 1) & (out.bound > 0) & jnp.isfinite(out.center).all(-1)
        # The level that would have been enough: the sample that is needed grows with the shortfall.
        needed = jnp.maximum(out.mass * out.shortfall, TINY) / estimator.first_size(epsilon)
        sufficient = estimator.LEVELS_PER_DOUBLING * jnp.log2(needed)
        # Small samples overstate the shortfall, so a long jump is damped.
        doublings = jnp.log2(jnp.clip(out.shortfall, 1, 1e6))
        jump = jnp.maximum(jnp.minimum(jnp.round(doublings), 2), jnp.round(0.5 * doublings))
        # At least one level, in integers: the loop ends whatever the arithmetic gave.
        next_level = state.level + jnp.maximum(jump.astype(jnp.int32), 1)
        ended = passed | (next_level >= count)
        keys = jnp.maximum((drawn.heavy | drawn.light).sum(-1), 1).astype(jnp.float32)
        rate = 1 / estimator.LEVELS_PER_DOUBLING
        grown = keys * jnp.exp2(rate * (next_level - state.level).astype(jnp.float32))
        expected = jnp.where(passed, keys, jnp.minimum(grown, estimator.level_size(next_level, epsilon)))
        expected = jnp.where(state.running, jnp.where(ended & ~passed, 0, expected), state.expected)
        certified = state.certified | passed
        running = go_on(state.running & ~ended, certified, expected)
        keep = lambda new, old: jnp.where(state.running.reshape(shape + (1,) * (new.ndim - 3)), new, old)
        return State(
            level=jnp.where(running, next_level, state.level),
            running=running,
            certified=certified,
            center=keep(out.center, state.center),
            denominator=keep(out.denominator, state.denominator),
            bound=keep(out.bound, state.bound),
            scale_lower=keep(out.scale_lower, state.scale_lower),
            # After dense, try again a level below where it gave up.
            sufficient=keep(jnp.where(passed, sufficient, state.level.astype(jnp.float32)), state.sufficient),
            expected=expected,
        )

    zero = jnp.zeros(shape, jnp.float32)
    possible = usable & (count > 0) & (budget.allowed >= epsilon / 2)
    first = jnp.where(possible, estimator.level_size(start, epsilon), 0)
    initial = State(
        level=start,
        running=go_on(possible, jnp.zeros(shape, bool), first),
        certified=jnp.zeros(shape, bool),
        center=jnp.zeros(query.shape, jnp.float32),
        denominator=zero,
        bound=zero,
        scale_lower=zero,
        sufficient=jnp.where(possible, start.astype(jnp.float32), -1),
        expected=first,
    )
    state = jax.lax.while_loop(lambda state: state.running.any(), body, initial)
    return state, prediction, log_size, count


def _rounding(query: jax.Array, cache: KVCache) -> jax.Array:
    """Error of float32 arithmetic relative to M: (e^{2η} − 1) + sums, certificate.md 10; [B, K, G]."""
    H = query.shape[-1]
    products = jnp.sqrt((query * query).sum(-1)) * cache.key_norm_max[:, :, None]
    eta = 2.0**-24 * ((H + 4) * products + 96)
    return jnp.expm1(2 * eta) + _sums_rounding(cache)


def _sums_rounding(cache: KVCache) -> float:
    """Relative error of a float32 sum over the keys, with the division: chunks of 1024 at most, then blocks of 64."""
    return 2.0**-24 * 4 * (1024 + 64 + cache.capacity / 4096)


def _center_rounding(cache: KVCache, values: levels.Values) -> jax.Array:
    """Error of ô that is not relative to M: Σ a ‖v − c0‖ + ‖c0‖ ≤ M + 2 ‖c0‖; [B, K, 1] in the values' unit."""
    return 2 * _sums_rounding(cache) * jnp.sqrt((values.center**2).sum(-1))


def _reads(cache, scores, log_size, log_tau, exact, count) -> dict[str, jax.Array]:
    """Counts at the last level; a row read for one head of a group serves all, so bytes are shared by the group."""
    H, G = cache.shape[-1], exact.shape[-1]
    drawn = estimator.sample(scores, log_size, log_tau)
    sampled = jnp.where(exact[..., None], scores.pool, drawn.heavy | drawn.light)
    looked = jnp.where(exact[..., None], scores.pool, estimator.candidates(scores, log_size, log_tau))
    row = H * cache.key.dtype.itemsize
    window_keys, pool_keys = (mask.sum(-1)[:, 0].astype(jnp.float32) for mask in (scores.window, scores.pool))  # [B, 1]
    rows = looked.any(2).sum(-1) + sampled.any(2).sum(-1)  # [B, K]
    scan = pool_keys * (H / 2 + 2 * H / BLOCK + 4.5)  # codes, scale and zero, two norms, a quarter of the third
    scan = jnp.where((count > 0).any(-1), scan, 0)
    group = rows.astype(jnp.float32) * row + 2 * row * window_keys + scan
    return {
        "keys_read": sampled.sum(-1).astype(jnp.int32),
        "candidates": looked.sum(-1).astype(jnp.int32),
        "bytes_read": jnp.broadcast_to((group / G)[..., None], exact.shape),
    }
