"""The whole step against the float64 oracle, and end to end against δ."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from absl.testing import parameterized

import certjax
from certjax import estimator, levels, perturbation, reference
from certjax.cache import from_storage
from certjax.quantization import from_bf16_bits
from tests.shared import oracle
from tests.shared.families import FAMILIES
from tests.shared.oracle_bounds import Head

TOKENS, HEAD_DIM = 1088, 16


@functools.cache
def family_cache(name, tokens=TOKENS, head_dim=HEAD_DIM):
    """The family as a cache of one row and kv head, and its query [1, 1, 1, H]."""
    family = FAMILIES[name](tokens, head_dim)
    cache = certjax.init_cache(batch=1, kv_heads=1, head_dim=head_dim, capacity=tokens, dtype="float32")
    key, value = (jnp.asarray(x)[None, :, None] for x in (family.keys, family.values))
    return certjax.prefill(cache, key, value), jnp.asarray(family.query)[None, None, None]


def seen_by_the_product(query, cache, words, config):
    """What the product knows before it samples: scores, values in units, prediction, c, unit."""
    *seen, c, unit = _seen_by_the_product(query, cache, words, config)
    return *seen, float(c), float(unit)


@jax.jit
def _seen_by_the_product(query, cache, words, config):
    grouped = query.reshape(1, 1, 1, -1) * jnp.float32(query.shape[-1] ** -0.5)
    pool, window = reference.masks(cache, config)
    raw = reference.exact_scores(grouped, cache.key)
    scores, c = reference._scores(grouped, cache, words, raw, pool, window)
    unit = reference._unit(cache, pool | window)
    values = reference._values(cache, from_storage(cache.value, cache.dtype) / unit, unit)
    norm_size = config.measure != "denominator"
    prediction = estimator.predict(scores, values.size, values.norm, values.square, norm_size)
    return scores, values, prediction, c[0, 0, 0], unit[0, 0, 0, 0]


class OracleTest(chex.TestCase):
    @parameterized.product(family=sorted(FAMILIES), bounds=("scalar", "full"))
    def test_what_the_product_certifies_the_oracle_certifies(self, family, bounds):
        cache, query = family_cache(family)
        config = certjax.Config(epsilon=0.4, delta=0.3, bounds=bounds, always_sample=True)
        for seed in range(3):
            rng = jax.random.key(seed)
            result = certjax.decode_attention(query, cache, rng=rng, config=config)
            words = perturbation.row_words(rng, 1, 1)
            scores, _, prediction, c, unit = seen_by_the_product(query, cache, words, config)
            values = np.asarray(cache.value[0, 0], np.float64)
            q = np.asarray(query[0, 0, 0], np.float64) * np.float64(np.float32(HEAD_DIM**-0.5))
            head = Head(
                np.asarray(cache.key[0, 0], np.float64) @ q,
                values,
                np.asarray(scores.window[0, 0, 0]),
                np.asarray(cache.value_center[0, 0], np.float64),
                np.asarray(from_bf16_bits(cache.value_size)[0, 0], np.float64),
                float(prediction.offset[0, 0, 0]) * unit,
                reference=c,
            )
            count = int(estimator.level_count(scores.pool.sum(), jnp.float32(0.4)))
            taus = unit * np.exp(
                [
                    float(estimator.log_threshold(jnp.int32(j), prediction.mass[0, 0, 0], jnp.float32(0.4)))
                    for j in range(count)
                ]
            )
            certificate = jax.tree.map(lambda x: np.asarray(x)[0, 0], result.certificate)
            if certificate.exact:
                np.testing.assert_allclose(result.output[0, 0, 0], head.output, atol=1e-5 * np.abs(values).max())
                continue
            judged = oracle.attend(
                head,
                np.asarray(scores.noise[0, 0, 0], np.float64),
                taus,
                epsilon=0.4 * (1 + 1e-3),
                delta=0.3,
                d_pred=float(prediction.denominator[0, 0, 0]),
                m_pred=float(jnp.sqrt(prediction.scale_squared[0, 0, 0])) * unit,
                tiers="both" if bounds == "full" else "scalar",
                levels=[int(certificate.level)],
            )
            self.assertEqual(judged["level"], certificate.level)
            self.assertEqual(judged["keys"], certificate.keys_read)
            scale = judged["allowed"] / 0.4
            np.testing.assert_allclose(
                result.output[0, 0, 0], judged["output"], atol=1e-5 * max(scale, np.abs(values).max())
            )
            # Beside the claim's radius, which is smaller by it, the bound holds the rounding of float32.
            grouped = query.reshape(1, 1, 1, -1) * jnp.float32(HEAD_DIM**-0.5)
            rounding = float(reference._rounding(grouped, cache)[0, 0, 0])
            largest = head.nu.max() + np.linalg.norm(head.center)
            radius = judged["target"] * (0.4 - rounding) / (0.4 * (1 + 1e-3))
            np.testing.assert_allclose(certificate.error_bound, radius + rounding * largest, rtol=2e-3)
            self.assertLessEqual(judged["error"], certificate.error_bound * 1.001 + 1e-6)

    def test_nothing_before_the_sample_depends_on_the_perturbations(self):
        cache, query = family_cache("flat")
        config = certjax.Config(epsilon=0.4, always_sample=True)
        seen = [
            seen_by_the_product(query, cache, perturbation.row_words(jax.random.key(s), 1, 1), config) for s in (0, 1)
        ]
        chex.assert_trees_all_equal(seen[0][1:], seen[1][1:])
        thresholds = set()
        for seed in range(12):
            c = certjax.decode_attention(query, cache, rng=jax.random.key(seed), config=config).certificate
            thresholds.add((int(c.level[0, 0]), float(c.threshold[0, 0])))
        self.assertEqual(len(thresholds), len({level for level, _ in thresholds}))  # one τ a level, whatever was drawn

    def test_another_step_draws_another_sample(self):
        cache, query = family_cache("flat")
        rng = jax.random.key(0)
        outputs = [
            certjax.decode_attention(
                query, cache, rng=jax.random.fold_in(rng, step), config=certjax.Config(epsilon=0.4, always_sample=True)
            ).output
            for step in range(4)
        ]
        self.assertEqual(len({np.asarray(x).tobytes() for x in outputs}), 4)

    def test_the_range_comes_from_the_pool_not_from_the_sample(self):
        cache, query = family_cache("spikes")
        config = certjax.Config(epsilon=0.4, always_sample=True)
        words = perturbation.row_words(jax.random.key(0), 1, 1)
        scores, values, prediction, _, unit = seen_by_the_product(query, cache, words, config)
        known = levels.known_range(scores, values, prediction, jnp.zeros((1, 1, 1)))
        true = (
            np.linalg.norm(np.asarray(cache.value - cache.value_center[:, :, None], np.float64), axis=-1)[0, 0] / unit
        )
        self.assertGreaterEqual(float(known.size_max[0, 0, 0]), true[np.asarray(scores.pool[0, 0, 0])].max())
        self.assertGreaterEqual(float(known.radius[0, 0, 0]), true.max())


BATCH = 64


@functools.partial(jax.jit, static_argnames=("measure", "bounds", "implementation"))
def _errors(query, cache, rng, measure, bounds, implementation):
    """Errors and certificates of BATCH independent draws of one head."""
    config = certjax.Config(epsilon=0.4, delta=0.3, measure=measure, bounds=bounds, always_sample=True)
    one = lambda key: certjax.decode_attention(query, cache, rng=key, config=config, implementation=implementation)
    results = jax.vmap(one)(jax.random.split(rng, BATCH))
    return results.output[:, 0, 0, 0], jax.tree.map(lambda x: x[:, 0, 0], results.certificate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "bounds", "implementation", "batches"),
    [
        ("value", "scalar", "xla", 30),
        ("value", "full", "xla", 30),
        ("output", "scalar", "xla", 30),
        ("output", "full", "xla", 30),
        ("denominator", "scalar", "xla", 30),
        ("value", "scalar", "native", 75),
        ("output", "scalar", "native", 75),
    ],
)
def test_violations_end_to_end(measure, bounds, implementation, batches):
    """δ = 0.3: no more violations than an exact binomial interval at 1e-6 allows; 10⁵ calls of each implementation."""
    calls = sampled = violations = 0
    worst = 0.0
    for family in sorted(FAMILIES):
        cache, query = family_cache(family)
        score = np.asarray(cache.key[0, 0], np.float64) @ np.asarray(query[0, 0, 0], np.float64) / np.sqrt(HEAD_DIM)
        weight = np.exp(score - score.max())
        attention, values = weight / weight.sum(), np.asarray(cache.value[0, 0], np.float64)
        output = attention @ values
        scale = {
            "value": np.sqrt(attention @ (values**2).sum(-1)),
            "output": np.linalg.norm(output),
            "denominator": 1.0,
        }[measure]
        for batch in range(batches):
            rng = jax.random.fold_in(jax.random.key(17), batch)
            got, c = _errors(query, cache, rng, measure, bounds, implementation)
            c = jax.tree.map(np.asarray, c)
            assert c.certified.all()
            if measure == "denominator":
                error = np.abs(np.expm1(c.log_normalizer.astype(np.float64) - score.max() - np.log(weight.sum())))
            else:
                error = np.linalg.norm(np.asarray(got, np.float64) - output, axis=-1)
            use = ~c.exact
            calls += BATCH
            sampled += use.sum()
            over = error[use] / (0.4 * scale)
            violations += (over > 1).sum()
            worst = max(worst, over.max(initial=0))
            np.testing.assert_array_less(error[~use], 1e-4 * (scale + np.abs(values).max()))
    counts = f"{calls} calls, {sampled} sampled, {violations} violations"
    print(f"{implementation} {measure} {bounds}: {counts}, largest error {worst:.3f} ε")
    assert sampled > calls / 20
    assert scipy.stats.binomtest(int(violations), int(sampled), 0.3, alternative="greater").pvalue > 1e-6
    assert violations == 0  # the certificate is conservative: one would be news
