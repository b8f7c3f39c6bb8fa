"""How the model reads its weights: through `certjax.project`, never a copy of them in another dtype."""

import importlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized

import certjax
from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama.modeling import apply_linear
from certjax.models.llama.prefill import _prefill_chunk

_generate = importlib.import_module("certjax.models.llama.generate")
KEY = jax.random.key(7)


class StepTest(parameterized.TestCase):
    @parameterized.parameters((jnp.bfloat16, False, 1), (jnp.bfloat16, True, 3), (jnp.float16, True, 1))
    def test_16_bit_weights_give_what_they_give_widened(self, dtype, tied, rows):
        config = dummy_config(tied_embeddings=tied, qkv_bias=True)
        model = dummy_model(config, dtype=dtype, attention="dense")
        widened = jax.tree.map(lambda x: x.astype(jnp.float32), model)
        tokens = jnp.arange(3, 3 + rows, dtype=jnp.int32)
        step = jax.jit(lambda model, *args: model.decode_step(*args, rng=KEY, config=certjax.Config())[0])
        got, expected = (step(m, tokens, m.init_caches(rows, 64), m.init_hints(rows)) for m in (model, widened))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=2e-5)
        # The plain forward over many rows is XLA's.
        plain = jax.jit(lambda model, ids: model(ids))(model, jnp.broadcast_to(tokens[:, None], (rows, 33)))
        np.testing.assert_allclose(got, plain[:, 0], atol=1e-4)

    def test_biases_of_any_dtype_are_added(self):
        layer = dummy_model(dummy_config(qkv_bias=True, output_bias=True, mlp_bias=True), dtype=jnp.bfloat16).layers[0]
        for linear in (layer.query, layer.key, layer.output, layer.gate):
            assert linear.bias is not None
            x = jax.random.normal(KEY, (2, 1, linear.in_features))
            np.testing.assert_allclose(apply_linear(x, linear)[0], linear(x), rtol=1e-5, atol=1e-5)


class MemoryTest(parameterized.TestCase):
    def setUp(self):
        super().setUp()
        # Every matrix is larger than everything else in the programs.
        config = dummy_config(hidden_size=128, intermediate_size=256, vocab_size=512, tied_embeddings=True)
        self.models = {d: dummy_model(config, dtype=d, attention="dense") for d in (jnp.bfloat16, jnp.float32)}

    def test_the_loop_reads_16_bit_weights_where_they_are(self):
        model = self.models[jnp.bfloat16]
        options = _generate._options(model, 1, 5, KEY, (), 0.0, None, 1.0, None, "call")
        weights, structure = jax.tree.flatten(model)
        caches = model.init_caches(1, 64, jnp.bfloat16)
        state, _ = _generate._begin(structure, weights, jnp.zeros((1, 512)), caches, options, max_new_tokens=5)
        jax.config.update("jax_disable_most_optimizations", False)  # what users get
        compiled = _generate._run.lower(structure, weights, state, options, np.int32(5)).compile()
        text = compiled.as_text()
        assert text.count('custom_call_target="certjax_project"') == 4 * 2 + 1
        assert not re.findall(r"= \S*\[(?:512,128|128,256|256,128)\]\S* (?:copy|transpose|fusion)\(", text)
        assert compiled.memory_analysis().temp_size_in_bytes < 4 * 512 * 128

    def test_a_prefill_widens_one_matrix_at_a_time(self):
        jax.config.update("jax_disable_most_optimizations", False)
        memory = {}
        for dtype, model in self.models.items():
            args = (model, model.init_caches(1, 64), jnp.zeros((1, 48), jnp.int32), jnp.ones((1,), jnp.int32))
            compiled = _prefill_chunk.lower(*args, jnp.zeros((1, 128)), all_logits=False).compile()
            memory[dtype] = compiled.memory_analysis().temp_size_in_bytes
        assert memory[jnp.bfloat16] - memory[jnp.float32] < 2 * 4 * 128 * 256  # two layers would be eight such
