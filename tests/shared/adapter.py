"""The product's functions under the names of `oracle_bounds`, so that one suite judges both.

Draws are the batch axis B of the product; K = G = 1. Everything that is tested comes from certjax itself: only the axes
and the dtype change here.
"""

import jax
import jax.numpy as jnp
import numpy as np

from certjax import certificate, estimator, levels
from certjax.estimator import Prediction, Scores

# Compiled once each: op by op they take most of the suite's time.
_range_factor = jax.jit(certificate.range_factor)
_variance_upper = jax.jit(certificate.variance_upper, static_argnums=4)
_spread_upper = jax.jit(certificate.spread_upper)
_eigenvalue_upper = jax.jit(certificate.eigenvalue_upper)
_scalar_shortfall = jax.jit(certificate.scalar_shortfall)
_matrix_shortfall = jax.jit(certificate.matrix_shortfall)
_value_scale = jax.jit(certificate.value_scale_squared_lower)
_scan_interval = jax.jit(levels.scan_interval)
_sample = jax.jit(estimator.sample)


def _f32(x):
    return jnp.asarray(np.asarray(x, np.float64), jnp.float32)


def _log(L):
    return jnp.full((1, 1, 1), L, jnp.float32)


def _inputs(head, exponentials, scan=None, scan_error=0.0):
    reference = np.max(head.scores) if head.reference is None else head.reference
    exact = _f32(head.scores - reference)[None, None, None]
    scores = Scores(
        exact=jnp.broadcast_to(exact, (len(exponentials), 1, 1, exact.shape[-1])),
        estimate=exact
        if scan is None
        else _f32(np.broadcast_to(scan, head.scores.shape) - reference)[None, None, None],
        half_width=_f32(np.broadcast_to(scan_error, head.scores.shape))[None, None, None],
        pool=jnp.asarray(~head.exact)[None, None, None],
        window=jnp.asarray(head.exact)[None, None, None],
        noise=_f32(exponentials)[:, None, None],
    )
    centered = _f32(head.values - head.center)[None, None]
    row = lambda x: _f32(x)[None, None, None]
    values = levels.Values(
        centered=jnp.broadcast_to(centered, (len(exponentials), *centered.shape[1:])),
        center=_f32(head.center)[None, None, None],
        square=row((head.values**2).sum(-1)),
        size=row(head.nu),
        norm=row(np.linalg.norm(head.values, axis=-1)),
    )
    log_size = (
        0.5 * jnp.log(values.size**2 + jnp.float32(head.r0) ** 2) if head.norm_size else jnp.zeros_like(values.size)
    )
    return scores, values, log_size


@jax.jit
def _level(scores, values, log_size, prediction, log_tau, cap):
    drawn = estimator.sample(scores, log_size, log_tau)
    every = jnp.full(scores.exact.shape[:3], cap)
    certain = levels.sums(drawn._replace(weight=jnp.zeros_like(drawn.weight)), values, every)
    sampled = levels.sums(drawn._replace(exact_weight=jnp.zeros_like(drawn.exact_weight)), values, every)
    known = levels.known_range(scores, values, prediction, log_tau)
    keys = (drawn.heavy | drawn.light).sum(-1)
    # C1 is observed: the product bounds it by Ĉ2 / 2 and never forms it. Here for comparison only.
    r1 = drawn.miss**2 * drawn.weight**2
    first_scatter = jnp.einsum("bkgs,bksh,bksi->bkghi", r1, values.centered, values.centered)
    whole = levels.sums(drawn, values, every)
    return (
        whole,
        levels.matrix_sums(drawn, values),
        known,
        keys,
        drawn.light.sum(-1),
        first_scatter,
        certain.capped,
        sampled.capped,
    )


def level_statistics(head, tau, exponentials, y_cap):
    """The product's sums of one level, flattened to [draws, …]."""
    assert head.norm_size, "the product samples with z = w for the denominator measure only"
    scores, values, log_size = _inputs(head, exponentials)
    shape = scores.exact.shape[:3]
    prediction = Prediction(*(jnp.full(shape, x, jnp.float32) for x in (1.0, 1.0, 1.0, head.r0)))
    log_tau = jnp.full(shape, np.log(tau), jnp.float32)
    level, (one, two, scatter), known, keys, light, first_scatter, certain, sampled = _level(
        scores, values, log_size, prediction, log_tau, jnp.float32(y_cap)
    )
    flat = lambda x: np.asarray(x, np.float64)[:, 0, 0]
    stats = {
        "D_e": flat(level.exact),
        "N_e": flat(level.exact_first),
        "D_s": flat(level.sampled),
        "N_s": flat(level.sampled_first),
        "k": flat(light),
        "keys": flat(keys),
        "Q1": flat(first_scatter),
        "Q2": flat(scatter),
        "tau": np.float64(tau),
        "y_cap": np.float64(y_cap),
        "r0": np.float64(head.r0),
        "r_pool": np.float64(known.size_max[0, 0, 0]),
        "t_min": np.float64(known.size_min[0, 0, 0]),
        "r_all": np.float64(known.radius[0, 0, 0]),
        "light": head.split(tau)[1].any(),
        "_level": level,
        "_two": (one, two, scatter),
        "_known": known,
    }
    for suffix, moments in (("0", level.variance), ("1", one), ("2", two)):
        stats |= {name + suffix: flat(x) for name, x in zip("Wmq", moments, strict=True)}
    # The product sums these in units of the cap.
    stats |= {f"T{p}": flat(x) * y_cap**p for p, x in enumerate(level.powers)}
    stats |= {"H_e": flat(certain) * y_cap, "H_s": flat(sampled) * y_cap}
    return stats


def _axes(x):
    """[draws, …] → [draws, 1, 1, …] in float32."""
    x = _f32(x)
    return x.reshape(x.shape[0], 1, 1, *x.shape[1:])


def _ball(radius):
    return _axes(radius)[..., None]


def _back(x):
    x = np.asarray(x, np.float64)[:, 0, 0]
    return x[..., 0] if x.ndim > 1 and x.shape[-1] == 1 else x


def range_factor(stats, x):
    known = stats["_known"]
    return _back(_range_factor(_axes(x), known))


def bennett_rate(x, variance, bound):
    return np.asarray(certificate.bennett_rate(_f32(x), _f32(variance), _f32(bound)), np.float64)


def mixture_bound(beta, trace, eigenvalue, L, dim):
    out = certificate.mixture_bound(jnp.float32(beta), _f32(trace), _f32(eigenvalue), jnp.float32(L), dim)
    return np.asarray(out, np.float64)


def scalar_variance_upper(stats, offset, radius, L):
    moments = stats["_level"].variance
    return _back(_variance_upper(moments, _axes(offset), _ball(radius), stats["_known"], 1.0, _log(L)))


def trace_upper(stats, offset, radius, L):
    one, two, _ = stats["_two"]
    center, b = _axes(offset), _ball(radius)
    unseen = _variance_upper(two, center, b, stats["_known"], 2.0, _log(L))
    return _back(_spread_upper(one, center, b)), _back(unseen)


def eigenvalue_upper(stats, offset, radius, L):
    _, two, scatter = stats["_two"]
    seen, unseen = _eigenvalue_upper(two, scatter, _axes(offset), _ball(radius), stats["_known"], _log(L))
    return _back(seen), _back(unseen)


def _ready(stats, target):
    level, known = stats["_level"], stats["_known"]
    denominator = level.exact + level.sampled
    center = (level.exact_first + level.sampled_first) / denominator[..., None]
    b_max = jnp.minimum(2 * known.radius, known.radius + jnp.sqrt((center**2).sum(-1)))
    target = _axes(target)
    return center, denominator, certificate.grid(target, b_max), np.asarray(target >= b_max)[:, 0, 0]


def scalar_certifies(stats, target, *, L_z, L_v):
    center, denominator, b, sure = _ready(stats, target)
    shortfall = _back(
        _scalar_shortfall(stats["_level"].variance, center, denominator, b, stats["_known"], _log(L_z), _log(L_v))
    )
    return sure | (shortfall < 1), shortfall


def mixture_certifies(stats, target, *, betas, L_z, L_v, L_s):
    center, denominator, b, sure = _ready(stats, target)
    one, two, scatter = stats["_two"]
    beta = jnp.broadcast_to(_f32(betas).reshape(1, 1, 1, -1), (*denominator.shape, len(betas)))
    logs = (_log(L_z), _log(L_v), _log(L_s))
    shortfall = _matrix_shortfall(one, two, scatter, center, denominator, b, stats["_known"], beta, *logs)
    return sure | (_back(shortfall) < 1), _back(shortfall)


def value_scale_lower(stats, L):
    level = stats["_level"]
    denominator = level.exact + level.sampled
    cap = jnp.full(denominator.shape, stats["y_cap"], jnp.float32)
    out = _value_scale(level.capped, level.powers, denominator, cap, stats["_known"], _log(L))
    return _back(out)


def target_radius(stats, center, *, epsilon, measure, mu_low):
    level = stats["_level"]
    offset = (level.exact_first + level.sampled_first) / (level.exact + level.sampled)[..., None]
    size = jnp.sqrt(((offset + _f32(center).reshape(1, 1, 1, -1)) ** 2).sum(-1))
    return _back(certificate.claim(measure, jnp.float32(epsilon), size, _axes(mu_low)))


def denominator_interval(head, scan, scan_error, tau, exponentials, L):
    assert not head.norm_size
    scores, _, log_size = _inputs(head, exponentials, scan, scan_error)
    log_tau = jnp.full(scores.exact.shape[:3], np.log(tau), jnp.float32)
    drawn = _sample(scores, log_size, log_tau)
    low, high = _scan_interval(scores, drawn, log_tau, _log(L))
    return _back(low), _back(high)
