"""One level of one step: sums of the sample, the estimate, the claim, and how far the certificate is from proving
it.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from certjax import certificate, estimator
from certjax.certificate import TINY, Moments, Range
from certjax.estimator import Prediction, Sample, Scores, total
from certjax.types import Config


class Values(NamedTuple):
    """Values and their sizes. y = v − c0 [B, K, S, H], c0 [B, K, 1, H]; the others [B, K, 1, S].

    `square` is ‖v‖²; `size` ≥ ‖y‖ and `norm` ≥ ‖v‖ come from metadata: second moments of y are taken from `size`, an
    upper bound by less than 1 %, so that a sampled value needs no norm of its own.
    """

    centered: jax.Array
    center: jax.Array
    square: jax.Array
    size: jax.Array
    norm: jax.Array


class Budget(NamedTuple):
    """What the events may cost.

    Attributes:
      tier: "scalar" or "both", a row of `certificate.FRACTIONS`.
      log_inverse: ln(1 / δ_j), [B, K, G].
      allowed: ε less the rounding of float32 arithmetic, [B, K, G].
      rounding: that rounding, relative to M: scores (e^{2η} − 1) and sums of a ‖v‖ ≤ M.
      center_rounding: what the sums add to it, since they run over v − c0: absolute, 2 ‖c0‖ times theirs.
    """

    tier: str
    log_inverse: jax.Array
    allowed: jax.Array
    rounding: jax.Array
    center_rounding: jax.Array

    def log(self, measure: str, event: str) -> jax.Array:
        """ln(1 / probability) that an event gets of this level's budget."""
        return self.log_inverse - jnp.log(certificate.FRACTIONS[measure, self.tier][event])


class Sums(NamedTuple):
    """Sufficient statistics of a level (certificate.md 5), plain sums over keys: shards would add them up.

    Attributes:
      exact: Σ w over exact and heavy keys, [B, K, G].
      exact_first: Σ w y, [B, K, G, H].
      sampled: Σ g over the sample.
      sampled_first: Σ g y.
      capped: Ĥ = Σ (w or g) min(‖v‖², cap) / cap.
      powers: T0, T1, T2 = Σ g² (min(‖v‖², cap) / cap)^p.
      variance: Moments of (1 − π) g².
    """

    exact: jax.Array
    exact_first: jax.Array
    sampled: jax.Array
    sampled_first: jax.Array
    capped: jax.Array
    powers: tuple[jax.Array, jax.Array, jax.Array]
    variance: Moments


class Outcome(NamedTuple):
    """What a level gives, [B, K, G]: ô − c0 [..., H], D̂, the bound that would be claimed, a lower bound of M,
    shortfall, Ẑ / τ.

    The claim is proven where `shortfall` < 1.
    """

    center: jax.Array
    denominator: jax.Array
    bound: jax.Array
    scale_lower: jax.Array
    shortfall: jax.Array
    mass: jax.Array


def sums(drawn: Sample, values: Values, cap: jax.Array) -> Sums:
    """The sums of tier 1 and of the event M; `cap` [B, K, G] truncates ‖v‖²."""
    square = drawn.weight**2
    spread = drawn.miss * square
    first = estimator.weighted_rows(jnp.stack([drawn.exact_weight, drawn.weight, spread], 2), values.centered)
    capped = jnp.minimum(values.square / cap[..., None], 1)
    either = (drawn.exact_weight + drawn.weight) * capped
    powers = [square, square * capped, square * capped**2]
    # One reduction for all: every program that holds this compiles faster.
    exact, sampled, hat, t0, t1, t2, s0, s2 = estimator.totals(
        drawn.exact_weight, drawn.weight, either, *powers, spread, spread * values.size**2
    )
    return Sums(exact, first[:, :, 0], sampled, first[:, :, 1], hat, (t0, t1, t2), Moments(s0, first[:, :, 2], s2))


def matrix_sums(drawn: Sample, values: Values) -> tuple[Moments, Moments, jax.Array]:
    """What tier 2 adds: Moments of (1 − π)² g² and of (2 − π) g², and Σ (2 − π) g² y yᵀ [B, K, G, H, H]."""
    r1, r2 = drawn.miss**2 * drawn.weight**2, (1 + drawn.miss) * drawn.weight**2
    weighted = jnp.moveaxis(r2[..., None] * values.centered[:, :, None], -1, 3)  # [B, K, G, H, S]
    scatter = estimator.weighted_rows(weighted, values.centered)
    w1, q1, w2, q2 = estimator.totals(r1, r1 * values.size**2, r2, r2 * values.size**2)
    first = estimator.weighted_rows(jnp.stack([r1, r2], 2), values.centered)
    return Moments(w1, first[:, :, 0], q1), Moments(w2, first[:, :, 1], q2), scatter


def known_range(scores: Scores, values: Values, prediction: Prediction, log_tau: jax.Array) -> Range:
    """Deterministic facts about the pool, from metadata: they never look at what was drawn."""
    every = jnp.ones_like(log_tau)
    window = jnp.where(scores.window, values.size, 0).max(-1)
    largest = jnp.where(scores.pool, values.size, 0).max(-1)
    smallest = jnp.where(scores.pool, values.size, jnp.inf).min(-1)
    return Range(
        tau=jnp.exp(log_tau),
        r0=prediction.offset,
        size_max=largest * every,
        size_min=jnp.sqrt(smallest**2 + prediction.offset**2),
        radius=jnp.maximum(largest, window) * every,
    )


def evaluate_output(
    config: Config,
    budget: Budget,
    scores: Scores,
    values: Values,
    prediction: Prediction,
    log_size: jax.Array,
    log_tau: jax.Array,
    drawn: Sample,
) -> Outcome:
    """Estimate, claim and shortfall for the value and output measures."""
    known = known_range(scores, values, prediction, log_tau)
    cap = jnp.maximum(4 * prediction.scale_squared, TINY)
    level = sums(drawn, values, cap)
    denominator = jnp.maximum(level.exact + level.sampled, TINY)
    center = (level.exact_first + level.sampled_first) / denominator[..., None]
    size = jnp.sqrt(((center + values.center) ** 2).sum(-1)) - budget.center_rounding  # ‖ô‖, from below
    size = jnp.maximum(size, 0)
    log = lambda event: budget.log(config.measure, event)
    if config.measure == "value":
        scale_squared = certificate.value_scale_squared_lower(
            level.capped, level.powers, denominator, cap, known, log("m")
        )
        # M of the true weights is a rounding away from that of the float32 ones.
        scale_squared = scale_squared * (1 - budget.rounding) ** 2
        bound = certificate.claim("value", budget.allowed, size, scale_squared) - budget.center_rounding
        scale_lower = jnp.maximum(jnp.sqrt(scale_squared), (size - bound) * (1 - budget.rounding))
    else:
        epsilon = jnp.asarray(config.epsilon, jnp.float32)
        largest = known.radius + jnp.sqrt((values.center**2).sum(-1))  # ≥ M: rounding is relative to it
        bound = certificate.claim("output", epsilon, size, jnp.zeros_like(size)) - budget.rounding * largest
        bound = bound - budget.center_rounding
        scale_lower = jnp.maximum(size - bound, 0) * (1 - budget.rounding)
    tight = jnp.maximum(bound, TINY)
    x0 = jnp.sqrt((center**2).sum(-1))
    b_max = jnp.minimum(2 * known.radius, known.radius + x0)
    b = certificate.grid(tight, b_max)
    shortfall = certificate.scalar_shortfall(level.variance, center, denominator, b, known, log("z1"), log("v1"))
    if budget.tier == "both":
        target = (budget.allowed * prediction.denominator) ** 2 * jnp.maximum(prediction.scale_squared, TINY)
        beta = jnp.maximum(target / (certificate.KAPPA * log("z2")), TINY)[..., None]
        if config.measure == "output":  # ‖o‖ cannot be predicted: a grid of smoothings
            beta = beta * jnp.array([1, 1 / 4, 1 / 16, 1 / 64], jnp.float32).reshape(1, 1, 1, 4)
        one, two, scatter = matrix_sums(drawn, values)
        logs = (log("z2"), log("v2"), log("s2"))
        second = certificate.matrix_shortfall(one, two, scatter, center, denominator, b, known, beta, *logs)
        shortfall = jnp.where(shortfall < 1, shortfall, jnp.minimum(shortfall, second))  # tier 2 where 1 fails
    # ô and o are at most b_max apart, so a claim as wide as that is true.
    shortfall = jnp.where(tight >= b_max, 0, shortfall)
    # Outside this range squares may flush to zero or overflow: the level proves nothing.
    least, most = (known.tau * certificate.range_factor(x, known) for x in (x0, x0 + b_max))
    sane = (least > 1e-12) & (most < 1e15) & (denominator > 1e-12) & (denominator < 1e15)
    sane &= (tight * denominator > 1e-12) & (bound > 0) & jnp.isfinite(bound + scale_lower + size)
    shortfall = jnp.where(sane & (shortfall < 1e30), shortfall, 1e30)  # a NaN is a failure
    return Outcome(center, denominator, bound, scale_lower, shortfall, _mass(scores, log_size, log_tau, drawn))


def scan_interval(scores: Scores, drawn: Sample, log_tau: jax.Array, log_d: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Interval for D relative to e^c, z = w: the sampled one, cut with what the scan's half-widths say for sure."""
    weight = jnp.where(scores.pool & ~drawn.heavy, jnp.exp(jnp.where(scores.pool, scores.estimate, 0)), 0)  # w̃ of A
    exact = total(drawn.exact_weight)
    gap = jnp.where(drawn.light, scores.estimate - scores.exact, 0)
    errors = jnp.where(drawn.light, -jnp.expm1(gap), 0)  # e / τ = (w − w̃) / w
    widest = jnp.where(scores.pool, scores.half_width, 0).max(-1)
    low, high = certificate.denominator_interval(exact + total(weight), errors, jnp.exp(log_tau), widest, log_d, total)
    surely = lambda sign: exact + total(weight * jnp.exp(jnp.where(scores.pool, sign * scores.half_width, 0)))
    outward = certificate.OUTWARD
    return jnp.maximum(low, surely(-1)) / outward, jnp.minimum(high, surely(1)) * outward


def evaluate_denominator(
    config: Config,
    budget: Budget,
    scores: Scores,
    values: Values,
    prediction: Prediction,
    log_size: jax.Array,
    log_tau: jax.Array,
    drawn: Sample,
) -> Outcome:
    """Interval of the denominator, and the output estimate (which this measure does not certify)."""
    low, high = scan_interval(scores, drawn, log_tau, budget.log_inverse + jnp.log(2.0))
    middle = 2 * low * high / (low + high)
    relative = (high - low) / (high + low)  # |middle − D| ≤ relative · D
    # The rounding of `low` and `high` is relative to the scan's sum, which may overshoot D.
    overshoot = total(jnp.where(scores.pool, jnp.exp(jnp.where(scores.pool, scores.estimate, 0)), 0))
    weight = drawn.exact_weight + drawn.weight
    center = estimator.weighted_rows(weight, values.centered) / jnp.maximum(total(weight), TINY)[..., None]
    sane = (low > 1e-12) & (high < 1e15) & (overshoot < 30 * low)
    shortfall = relative * certificate.MARGIN / budget.allowed
    shortfall = jnp.where(sane & (shortfall < 1e30), shortfall, 1e30)
    mass = _mass(scores, log_size, log_tau, drawn)
    return Outcome(center, middle, relative + budget.rounding, jnp.zeros_like(middle), shortfall, mass)


def _mass(scores: Scores, log_size: jax.Array, log_tau: jax.Array, drawn: Sample) -> jax.Array:
    """Ẑ / τ: a heavy key counts z / τ, a drawn light key 1."""
    heavy = jnp.where(drawn.heavy, jnp.exp(scores.exact + log_size - log_tau[..., None]), 0)
    return total(heavy) + drawn.light.sum(-1).astype(jnp.float32)
