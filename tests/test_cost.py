"""When heads go dense: the rule, and that it holds over steps, in both implementations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import certjax
from certjax import cost
from tests.shared import inputs


class RuleTest(chex.TestCase):
    def test_pays(self):
        at = lambda n, keys: bool(cost.pays(jnp.int32(n), jnp.int32(n - 64), jnp.int32(keys)))
        self.assertTrue(at(8192, 300))
        self.assertFalse(at(8192, 1200))
        self.assertFalse(at(512, 30))  # a step has a fixed cost
        self.assertTrue(at(1 << 20, 10_000))

    def test_go_on(self):
        running = jnp.array([True, True, False])
        certified = jnp.array([False, False, True])
        go = lambda keys, n, c=certified: cost.go_on(running, c, jnp.array(keys, jnp.float32), jnp.array([n]))
        np.testing.assert_array_equal(go([90, 90, 50], 1000), running)
        np.testing.assert_array_equal(go([90, 120, 50], 1000), [False] * 3)  # too dear
        np.testing.assert_array_equal(go([9, 9, 9], 1000, certified & False), [False] * 3)  # one gave up


class StepsTest(chex.TestCase):
    """Diffuse heads at a small ε: sampling cannot pay."""

    @parameterized.parameters("xla", "native")
    def test_a_head_that_does_not_pay_waits_and_tries_again(self, implementation):
        key, value, query = inputs.draw("gaussian", seed=0, tokens=2048, kv_heads=2, groups=2, head_dim=16)
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=16, capacity=2048, dtype="float32")
        cache = certjax.prefill(cache, 0.3 * key, value)
        hint, waits = certjax.init_hint(batch=1, heads=4), []
        for step in range(cost.WAIT + 3):
            result = certjax.decode_attention(
                query[:, -1:],
                cache,
                rng=jax.random.key(step),
                config=certjax.Config(epsilon=0.3),
                hint=hint,
                implementation=implementation,
            )
            self.assertTrue(bool(result.certificate.exact.all()))
            hint = result.hint
            waits.append(np.asarray(hint.wait)[0])
        for head in range(4):
            self.assertEqual([w[head] for w in waits], [*range(cost.WAIT, -1, -1), cost.WAIT, cost.WAIT - 1])
        self.assertTrue(bool((hint.level > 0).all()))  # remembered while waiting

    @parameterized.parameters("xla", "native")
    def test_always_sample_does_not_mind(self, implementation):
        key, value, query = inputs.draw("gaussian", seed=0, tokens=2048, kv_heads=2, groups=2, head_dim=16)
        cache = certjax.init_cache(batch=1, kv_heads=2, head_dim=16, capacity=2048, dtype="float32")
        cache = certjax.prefill(cache, 0.3 * key, value)
        waiting = certjax.Hint(jnp.full((1, 4), 8.0), jnp.full((1, 4), 5, jnp.int32))
        result = certjax.decode_attention(
            query[:, -1:],
            cache,
            rng=jax.random.key(0),
            config=certjax.Config(epsilon=0.3, always_sample=True),
            hint=waiting,
            implementation=implementation,
        )
        self.assertFalse(bool(result.certificate.exact.any()))
        self.assertEqual(int(result.hint.wait.max()), 0)
