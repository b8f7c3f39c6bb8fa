"""Tier 2 of the certificate and the measure "denominator" in the extension: against their definition, and against δ."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from absl.testing import parameterized

import certjax
from certjax import _ffi, perturbation
from certjax.types import Hint
from tests.shared.certified_cases import Case, assert_same_results, draw, no_hint, run_both
from tests.shared.families import FAMILIES

FULL, OUTPUT, DENOMINATOR = ("bounds", "full"), ("measure", "output"), ("measure", "denominator")
SINKS = ("sinks", 5)
CASES = (
    Case(options=(FULL,)),
    Case(dtype="bfloat16", head_dim=48, options=(FULL, OUTPUT)),
    Case(dtype="bfloat16", head_dim=48, options=(DENOMINATOR, SINKS)),
)
EPSILON = {"value": 0.3, "output": 0.4, "denominator": 0.1}


def native(case, query, cache, words, epsilon, isa=None):
    return _ffi.certified_decode(query, cache, words, case.config(epsilon), no_hint(case), isa=isa)


class FullTest(chex.TestCase):
    @parameterized.product(case=CASES)
    def test_matches_the_definition_on_every_level(self, case):
        epsilon = EPSILON[case.config().measure]
        sampled = 0
        for seed in range(2):
            query, cache, words, _ = draw(case, seed)
            (output, c, hint), (other, d, other_hint) = run_both(case, query, cache, words, epsilon, no_hint(case))
            for name in ("certified", "exact", "level", "keys_read"):
                np.testing.assert_array_equal(getattr(d, name), getattr(c, name), err_msg=name)
            use = ~c.exact
            sampled += int(use.sum())
            np.testing.assert_allclose(d.error_bound[use], c.error_bound[use], rtol=1e-4)
            np.testing.assert_allclose(d.log_normalizer, c.log_normalizer, rtol=1e-6, atol=1e-5)
            np.testing.assert_allclose(d.value_scale_lower[use], c.value_scale_lower[use], rtol=1e-4)
            size = np.abs(output).max(-1, keepdims=True) + c.value_scale_lower[..., None]
            np.testing.assert_array_less(np.abs(other - output)[use], np.broadcast_to(1e-5 * size, output.shape)[use])
            # Where tier 1 passes, tier 2 is not computed: it could only have let the next step start lower.
            np.testing.assert_allclose(np.asarray(other_hint.level)[use], np.asarray(hint.level)[use], atol=2e-2)
            results = [native(case, query, cache, words, epsilon, isa) for isa in _ffi.isa_levels()[seed:]]
            for result in results[1:]:
                assert_same_results(results[0], result)
        self.assertGreater(sampled, 4)

    def test_tier_two_certifies_where_tier_one_does_not(self):
        case = CASES[0]
        query, cache, words, names = draw(case, 0)
        self.assertEqual(names[1][1], "flat")
        full, tier_one = (np.asarray(native(x, query, cache, words, 0.2)[1].keys_read)[1, 1] for x in (case, Case()))
        np.testing.assert_array_less(full, 0.8 * tier_one)

    def test_choice(self):
        for change in ({"bounds": "full"}, {"measure": "denominator"}):
            config = certjax.Config(**change)
            self.assertEqual(certjax.choose_implementation("native", config), "native")
            self.assertEqual(certjax.choose_implementation(None, config), certjax.choose_implementation())


CALLS = 64  # rows of a program
EVENT_FAMILIES = ("flat", "peaked", "rank_one", "pareto", "spikes")
TOKENS, HEAD_DIM, HEADS = 1088, 16, len(EVENT_FAMILIES)


@functools.cache
def events_input():
    """One row whose kv heads are the families: query [1, K, 1, H], cache, and its heads in float64."""
    heads = [FAMILIES[name](TOKENS, HEAD_DIM) for name in EVENT_FAMILIES]
    key, value = (jnp.asarray(np.stack(x, 1))[None] for x in zip(*((h.keys, h.values) for h in heads), strict=True))
    cache = certjax.init_cache(batch=1, kv_heads=HEADS, head_dim=HEAD_DIM, capacity=TOKENS, dtype="float32")
    query = jnp.asarray(np.stack([h.query for h in heads]))[None, :, None] / np.float32(np.sqrt(HEAD_DIM))
    return query, certjax.prefill(cache, key, value), heads


@pytest.mark.parametrize("options", [(FULL,), (FULL, OUTPUT), (DENOMINATOR,)])
def test_violations(options):
    """δ = 0.3 over 3 200 calls: no more violations than an exact binomial interval at 1e-6 allows."""
    query, cache, heads = events_input()
    config = certjax.Config(epsilon=jnp.float32(0.4), delta=jnp.float32(0.3), always_sample=True, **dict(options))
    hint = Hint(jnp.full((1, HEADS, 1), -1, jnp.float32), jnp.zeros((1, HEADS, 1), jnp.int32))
    one = jax.jit(jax.vmap(lambda words: _ffi.certified_decode(query, cache, words, config, hint)[:2]))
    sampled = violations = 0
    for batch in range(10):
        rngs = jax.random.split(jax.random.key(batch), CALLS)
        words = jax.vmap(lambda rng: perturbation.row_words(rng, 1, HEADS))(rngs)
        output, c = jax.tree.map(lambda x: np.asarray(x)[:, 0, :, 0], one(words))
        assert c.certified.all()
        for k, head in enumerate(heads):
            weight = np.exp(head.scores - head.scores.max())
            attention, values = weight / weight.sum(), head.values.astype(np.float64)
            if config.measure == "denominator":
                error = np.abs(np.expm1(c.log_normalizer[:, k] - head.scores.max() - np.log(weight.sum())))
                scale = 1.0
            else:
                error = np.linalg.norm(output[:, k] - attention @ values, axis=-1)
                second = np.sqrt(attention @ (values**2).sum(-1))
                scale = second if config.measure == "value" else np.linalg.norm(attention @ values)
            use = ~c.exact[:, k]
            sampled += use.sum()
            violations += (error > 0.4 * scale)[use].sum()
            # The radius that is reported is a claim of its own.
            violations += ((error > c.error_bound[:, k]) & (error <= 0.4 * scale))[use].sum()
            np.testing.assert_array_less(error[~use], 1e-4 * (scale + np.abs(values).max()))
    assert sampled > 1000
    assert scipy.stats.binomtest(int(violations), int(sampled), 0.3, alternative="greater").pvalue > 1e-6
    assert violations == 0  # the certificate is conservative: one would be news
