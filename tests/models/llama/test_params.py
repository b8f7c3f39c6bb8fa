import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from absl.testing import parameterized

from certjax.models.dummy import dummy_config, dummy_model, dummy_tensors
from certjax.models.llama import abstract_params, load_model, params_from_tensors

IDS = jnp.array([[1, 5, 2, 9]], jnp.int32)
EVERYTHING = {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}


class ParamsTest(parameterized.TestCase):
    @parameterized.parameters({}, {"tied_embeddings": True}, EVERYTHING)
    def test_tree_is_what_the_model_expects(self, **fields):
        config = dummy_config(**fields)
        params = params_from_tensors(config, dummy_tensors(config))
        expected = abstract_params(config)
        assert jax.tree.structure(params) == jax.tree.structure(expected)
        assert jax.tree.map(lambda x: (x.shape, str(x.dtype)), params) == jax.tree.map(
            lambda x: (x.shape, str(x.dtype)), expected
        )

    def test_kernels_are_transposed(self):
        config = dummy_config()
        tensors = dummy_tensors(config)
        params = params_from_tensors(config, tensors)
        np.testing.assert_array_equal(
            params["layers"]["1"]["gate"]["kernel"], tensors["model.layers.1.mlp.gate_proj.weight"].T
        )
        np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])

    def test_names_everything_that_is_wrong_at_once(self):
        config = dummy_config()
        tensors = dummy_tensors(config)
        del tensors["model.layers.0.mlp.up_proj.weight"]
        del tensors["lm_head.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32), np.float32)
        tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros((64,), np.float32)
        tensors["model.norm.weight"] = np.zeros((33,), np.float32)
        tensors["model.layers.0.mlp.down_proj.weight"] = np.zeros((48, 32), np.float32)
        with pytest.raises(ValueError, match="does not fit") as caught:
            params_from_tensors(config, tensors)
        for part in (
            "missing model.layers.0.mlp.up_proj.weight [48, 32]",
            "missing lm_head.weight [64, 32]",
            "not used: model.layers.2.mlp.up_proj.weight",
            "not used: model.layers.0.self_attn.q_proj.bias",
            "model.norm.weight has shape [33], expected [32]",
            "model.layers.0.mlp.down_proj.weight has shape [48, 32], expected [32, 48]",
        ):
            assert part in str(caught.value)
        assert str(caught.value).count(";") == 5

    # Pitfall 20.
    def test_tied_embeddings(self):
        config = dummy_config(tied_embeddings=True)
        tensors = dummy_tensors(config)
        absent = params_from_tensors(config, tensors)
        assert "head" not in absent
        present = params_from_tensors(config, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()})
        jax.tree.map(np.testing.assert_array_equal, absent, present)
        separate = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}
        with pytest.raises(ValueError, match=r"lm_head.weight differs.*tie_word_embeddings = true.*contradict"):
            params_from_tensors(config, separate)

    def test_tensors_are_read_lazily_and_once(self):
        config = dummy_config()
        reads = []

        def reader(name, tensor):
            return lambda: reads.append(name) or tensor

        tensors = dummy_tensors(config)
        lazy = {name: reader(name, tensor) for name, tensor in tensors.items()}
        jax.tree.map(
            np.testing.assert_array_equal, params_from_tensors(config, lazy), params_from_tensors(config, tensors)
        )
        assert sorted(reads) == sorted(tensors)

    def test_old_rotary_buffers_are_ignored(self):
        config = dummy_config()
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
        params_from_tensors(config, dummy_tensors(config) | extra)

    @parameterized.parameters(ml_dtypes.bfloat16, np.float16)
    def test_16_bit_weights_stay_16_bit(self, dtype):
        config = dummy_config()
        tensors = dummy_tensors(config)
        params = params_from_tensors(config, tensors, dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}
        model = load_model(params, config, attention="dense")
        assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {np.dtype(dtype)}
        rounded = {name: x.astype(dtype).astype(np.float32) for name, x in tensors.items()}
        exact = load_model(params_from_tensors(config, rounded), config, attention="dense")
        np.testing.assert_allclose(model(IDS), exact(IDS), atol=1e-4)
        assert model(IDS).dtype == jnp.float32


class LoadModelTest(parameterized.TestCase):
    def test_names_everything_that_is_wrong(self):
        config = dummy_config()
        params = params_from_tensors(config, dummy_tensors(config))
        del params["layers"]["0"]["up"]
        params["norm"]["scale"] = np.zeros((3,), np.float32)
        params["layers"]["7"] = {"up": {"kernel": np.zeros((1,), np.float32)}}
        with pytest.raises(ValueError, match="do not fit") as caught:
            load_model(params, config)
        for part in (
            "missing layers.0.up.kernel",
            "unknown layers.7.up.kernel",
            "norm.scale has shape [3], expected [32]",
        ):
            assert part in str(caught.value)

    def test_shares_the_arrays(self):
        config = dummy_config()
        params = jax.tree.map(jnp.asarray, params_from_tensors(config, dummy_tensors(config)))
        first, second = load_model(params, config), load_model(params, config, attention="dense")
        for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
            assert a.unsafe_buffer_pointer() == b.unsafe_buffer_pointer()
        assert first.embedding[...].unsafe_buffer_pointer() == params["embedding"].unsafe_buffer_pointer()

    def test_ten_layers_keep_their_order(self):
        config = dummy_config(num_layers=11)  # "10" sorts before "2"
        tensors = dummy_tensors(config)
        model = dummy_model(config)
        for i in range(11):
            np.testing.assert_array_equal(
                model.layers[i].query.kernel[...], tensors[f"model.layers.{i}.self_attn.q_proj.weight"].T
            )

    def test_unknown_attention(self):
        config = dummy_config()
        params = params_from_tensors(config, dummy_tensors(config))
        with pytest.raises(ValueError, match="attention must be one of certified, dense or a callable, got 'sparse'"):
            load_model(params, config, attention="sparse")
