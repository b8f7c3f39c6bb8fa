"""`certjax audit`: puts the certificate to the test on a model and texts of one's own.

Protocol. A model reads a text with exact attention. At each of the newest positions, every layer's query is answered by
certified attention over the cache as it was then, with fresh perturbations, and the error against dense attention in
float32 is compared with what was claimed. Heads are sampled wherever a level certifies (`always_sample`), since a head
that is computed exactly tests nothing. Certified calls are counted by query head; those that came out exact are counted
apart. A violation is a sampled, certified call whose error exceeds ε times the scale of its measure, or the error_bound
that it reported. The interval of the rate is exact (Clopper and Pearson 1934) for independent calls; query heads that
share a kv head share their perturbations, so theirs are not independent. δ is exceeded where the interval of the rate
among all certified calls lies above it.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import binomtest

import certjax
from certjax import reference
from certjax.cache import from_storage
from certjax.eval.inputs import Recorded
from certjax.types import Measure, init_hint

MEASURES: tuple[Measure, ...] = ("value", "output", "denominator")
EPSILONS = (0.05, 0.1, 0.2, 0.3)
CONFIDENCE = 0.99  # of the two-sided interval for the rate of violations


def audit(
    recorded: Recorded,
    measure: Measure,
    *,
    epsilons: tuple[float, ...] = EPSILONS,
    delta: float = 1e-3,
    steps: int,
    repeats: int = 1,
    seed: int = 0,
    stream: int = 0,
) -> list[dict[str, Any]]:
    """Audits one measure on recorded inputs; a row for each ε.

    Args:
      recorded: attention inputs.
      measure: what is claimed.
      epsilons: allowed errors.
      delta: per call and query head.
      steps: newest positions.
      repeats: calls with fresh perturbations at each of them.
      seed: of the perturbations.
      stream: another number gives other perturbations.

    Returns:
      Rows: `calls` (sampled and certified), `exact`, `refused` (neither), `violations` with the `interval` of their
      rate, whether it `holds`, `wrong_exact` (exact heads that are off by more than float32 explains), error over
      allowed error (`largest`, `p99`, `histogram`), `tightness` (median of bound over true error), where the worst call
      was, keys and bytes a call.
    """
    parts: list[dict[str, np.ndarray]] = []
    for layer in range(len(recorded.caches)):
        lengths = recorded.caches[layer].length - jnp.arange(steps, dtype=jnp.int32)[::-1]
        queries = jnp.asarray(recorded.queries[layer, -steps:])
        rng = jax.random.key(seed)
        for number in (stream, MEASURES.index(measure), layer):
            rng = jax.random.fold_in(rng, number)
        config = certjax.Config(epsilon=0.1, delta=jnp.float32(delta), measure=measure, always_sample=True)
        parts.append(
            jax.device_get(
                _replay(
                    recorded.caches[layer], queries, lengths, jnp.asarray(epsilons, jnp.float32), rng, config, repeats
                )
            )
        )
    facts = {name: np.stack([part[name] for part in parts]) for name in parts[0]}  # [L, T, E, R, N]
    return [
        {"measure": measure, "epsilon": epsilon, "delta": delta, "steps": steps, "repeats": repeats, "seed": seed}
        | _row({name: x[:, :, e] for name, x in facts.items()}, delta)
        for e, epsilon in enumerate(epsilons)
    ]


@functools.partial(jax.jit, static_argnames="repeats")
def _replay(cache, queries, lengths, epsilons, rng, config, repeats):
    """Facts [T, E, R, N] of a layer; the hints of each ε go from position to position as in decoding."""
    N = queries.shape[1]

    def step(hints, at):
        query, length, t = at
        here = dataclasses.replace(cache, length=length[None])
        output, log_normalizer, scale = _dense(query[None, None], here)
        new_hints, facts = [], []
        for e, hint in enumerate(hints):
            promise = dataclasses.replace(config, epsilon=epsilons[e])
            tries = []
            for r in range(repeats):
                key = jax.random.fold_in(rng, (t * len(hints) + e) * repeats + r)
                result = certjax.decode_attention(query[None, None], here, rng=key, config=promise, hint=hint)
                tries.append(_facts(result, output, log_normalizer, scale, promise))
            new_hints.append(result.hint)
            facts.append(jax.tree.map(lambda *x: jnp.stack(x), *tries))
        return tuple(new_hints), jax.tree.map(lambda *x: jnp.stack(x), *facts)

    hints = tuple(init_hint(batch=1, heads=N) for _ in range(epsilons.shape[0]))
    return jax.lax.scan(step, hints, (queries, lengths, jnp.arange(len(queries), dtype=jnp.int32)))[1]


def _facts(result, output, log_normalizer, scale, config):
    """Of every head [N]: error and claim in the units of the measure, and what the certificate says."""
    certificate = jax.tree.map(lambda x: x[0], result.certificate)
    error = jnp.sqrt(((result.output[0, 0] - output) ** 2).sum(-1))
    allowed = config.epsilon * scale
    if config.measure == "output":
        allowed = config.epsilon * jnp.sqrt((output**2).sum(-1))
    if config.measure == "denominator":
        error, allowed = jnp.abs(jnp.expm1(certificate.log_normalizer - log_normalizer)), config.epsilon
    unit = jnp.float32(1) if config.measure == "denominator" else scale
    return {
        "ratio": error / jnp.maximum(allowed, 1e-30),
        # Not >: a NaN is wrong too. What float32 leaves open of the reference itself is allowed for.
        "broken": ~((error <= allowed * (1 + 1e-5)) & (error <= certificate.error_bound * (1 + 1e-5) + 1e-6 * unit)),
        "off": ~(error <= 1e-4 * unit),
        "tightness": certificate.error_bound / jnp.maximum(error, 1e-30),
        "certified": certificate.certified,
        "exact": certificate.exact,
        "keys": certificate.keys_read,
        "bytes": certificate.bytes_read,
    }


def _dense(query, cache):
    """Dense attention: output [N, H], log-normaliser and M [N]."""
    _, K, _, H = cache.shape
    grouped = query.reshape(1, K, -1, H) * jnp.float32(H**-0.5)
    pool, window = reference.masks(cache, certjax.Config())
    attended = pool | window
    key, value = (
        jnp.where(attended[:, :, 0, :, None], from_storage(x, cache.dtype), 0) for x in (cache.key, cache.value)
    )
    output, log_normalizer, square = reference.dense(reference.exact_scores(grouped, key), attended, value)
    return output.reshape(-1, H), log_normalizer.reshape(-1), jnp.sqrt(square).reshape(-1)


def _row(facts: dict[str, np.ndarray], delta: float) -> dict[str, Any]:
    """Facts [L, T, R, N] of one ε."""
    sampled = facts["certified"] & ~facts["exact"]
    calls = int(sampled.sum())
    ratio = np.where(sampled, facts["ratio"], 0)
    violations = int((sampled & facts["broken"]).sum())
    exact = facts["certified"] & facts["exact"]
    wrong_exact = int((exact & facts["off"]).sum())
    low, high = binomial_interval(violations, calls)
    worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
    seen = ratio[sampled]
    return {
        "calls": calls,
        "exact": int(exact.sum()),
        "wrong_exact": wrong_exact,
        "refused": int((~facts["certified"]).sum()),
        "violations": violations,
        "interval": [low, high],
        "holds": binomial_interval(violations, calls + int(exact.sum()))[0] <= delta and not wrong_exact,
        "largest": float(ratio.max()),
        "p99": float(np.percentile(seen, 99)) if calls else None,
        "tightness": float(np.median(facts["tightness"][sampled])) if calls else None,
        "worst": {"layer": int(worst[0]), "position": int(worst[1]) - facts["ratio"].shape[1], "head": int(worst[3])},
        "keys": float(facts["keys"].mean()),
        "keys_sampled": float(facts["keys"][sampled].mean()) if calls else None,
        "keys_by_layer_and_head": facts["keys"].mean((1, 2)).round(1).tolist(),
        "bytes": float(facts["bytes"].mean()),
        "histogram": np.histogram(np.minimum(seen, 1.2), np.linspace(0, 1.2, 49))[0].tolist(),
    }


def binomial_interval(violations: int, calls: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Two-sided interval of a rate (Clopper and Pearson 1934); (0, 1) without calls."""
    if not calls:
        return 0.0, 1.0
    interval = binomtest(violations, calls).proportion_ci(confidence, method="exact")
    return float(interval.low), float(interval.high)
