import dataclasses
import math

import pytest
from absl.testing import parameterized

from certjax.models.dummy import dummy_config
from certjax.models.llama import LlamaConfig, RopeConfig
from certjax.models.llama import config as config_module

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "original_max_positions": 9,
    "context": 9,
    "short_factor": (1.0,),
    "long_factor": (1.0,),
}


def of(family, **fields):
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return LlamaConfig.from_hf(LLAMA | {"model_type": family, "architectures": [architecture + "ForCausalLM"]} | fields)


class FromHfTest(parameterized.TestCase):
    def test_plain_llama(self):
        config = of("llama")
        assert (config.head_dim, config.rope, config.windows) == (16, RopeConfig(), (None, None))
        assert not (config.qkv_bias)
        assert not (config.output_bias)
        assert not (config.mlp_bias)
        assert not (config.qk_norm)
        assert of("llama", num_key_value_heads=None).num_kv_heads == 4

    def test_rope_spellings_mean_the_same(self):
        inner = of("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5})
        legacy = LLAMA3 | {"type": "llama3"}
        legacy.pop("rope_type")
        for other in (
            of("llama", rope_scaling=LLAMA3, rope_theta=5e5),
            of("llama", rope_scaling=legacy, rope_theta=5e5),
            of("llama", rope_scaling=LLAMA3, rope_parameters=LLAMA3, rope_theta=5e5),
        ):
            assert inner == other
        assert inner.rope.theta == 500000.0
        assert inner.rope.factor == 8.0

    def test_yarn_takes_the_models_context_where_none_is_given(self):
        rope = of("llama", rope_scaling={"type": "yarn", "factor": 4}).rope
        assert rope.original_max_positions == 2048

    def test_biases_and_norms_of_families(self):
        families = [of("llama"), of("mistral", sliding_window=None), of("qwen2"), of("qwen3")]
        assert [config.qkv_bias for config in families] == [False, False, True, False]
        assert [config.qk_norm for config in families] == [False, False, False, True]
        biased = of("llama", attention_bias=True, mlp_bias=True)
        assert biased.qkv_bias
        assert biased.output_bias
        assert biased.mlp_bias
        assert not of("qwen2").output_bias
        assert of("qwen3").head_dim == 128

    def test_windows(self):
        assert of("mistral", sliding_window=16).windows == (16, 16)
        assert of("mistral", sliding_window=None).windows == (None, None)
        off = {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1}
        assert of("qwen2", **off).windows == (None, None)
        assert of("qwen2", **(off | {"use_sliding_window": True})).windows == (None, 16)
        types = ["sliding_attention", "full_attention"]
        assert of("qwen3", sliding_window=8, use_sliding_window=True, layer_types=types).windows == (8, None)

    @parameterized.parameters(
        ({"model_type": "gemma"}, "model_type 'gemma' is not supported; expected one of llama"),
        ({"model_type": None}, "model_type None"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"logit_scale": 2.0, "residual_multiplier": 1}, "logit_scale, residual_multiplier"),
        ({"sliding_window": 4}, "does not know for model_type 'llama': sliding_window"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, expected 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        ({"rope_interleaved": True}, "rope_interleaved = True"),
        ({"vocab_size": None, "rms_norm_eps": None}, "missing fields: vocab_size, rms_norm_eps"),
        ({"model_type": "qwen2", "architectures": None, "num_key_value_heads": None}, "missing.*num_key_value_heads"),
        ({"hidden_size": 66}, "not a multiple of num_attention_heads"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "'ntk' is not supported; expected one of default"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0, "context": 9}}, "does not know: context"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False, "mscale": 1.0, "mscale_all_dim": 1.0}},
            "does not know: mscale, mscale_all_dim, truncate",
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 512}},
            "is 512 and max_position_embeddings 2048: which of them a dynamic",
        ),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2.0, "original_max_position_embeddings": 512}},
            "factor is 2.0, but max_position_embeddings ÷ original_max_position_embeddings is 4.0",
        ),
        (
            {"rope_scaling": {"type": "su", "factor": 2.0, "original_max_position_embeddings": "512"}},
            "original_max_positions must be a positive finite number, got '512'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2}}, "keep one of them"),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_type": "default"}}, "contradict"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 10000.0 at top level"),
        ({"rope_theta": -1}, "rope_theta must be a positive finite number, got -1"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer, got 0"),
        ({"hidden_size": "576"}, "hidden_size must be a positive integer, got '576'"),
        ({"num_hidden_layers": "30"}, "num_hidden_layers must be a positive integer, got '30'"),
        ({"num_hidden_layers": 30.0}, "num_hidden_layers must be a positive integer, got 30.0"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not supported"),
        ({"architectures": 5}, "architectures 5 with model_type 'llama' is not supported"),
        ({"rope_scaling": ["a"]}, r"rope_scaling must be an object, got \['a'\]"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object, got 'x'"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rotary type \['yarn'\] is not supported"),
        ({"rope_parameters": {"theta": 5}}, "rotary fields that certjax does not know: theta"),
        ({"rope_scaling": LLAMA3 | {"angles": "exact"}}, "rotary fields that certjax does not know: angles"),
        ({"rope_scaling": {"type": "linear", "original_max_positions": 5}}, "does not know: original_max_positions"),
        ({"rope_scaling": {"type": "linear", "factor": math.inf}}, "factor must be a positive finite number, got inf"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive finite number, got inf"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a positive finite number, got inf"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a positive finite number, got nan"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"attention_bias": "no"}, "attention_bias must be true or false, got 'no'"),
    )
    def test_refuses(self, fields, message):
        with pytest.raises(ValueError, match=message):
            LlamaConfig.from_hf(LLAMA | fields)

    @parameterized.parameters(
        ({"layer_types": 5}, "layer_types must be a list, got 5"),
        ({"layer_types": [["full_attention"]] * 2}, r"layer_types has \['full_attention'\], expected only"),
        ({"use_sliding_window": "yes"}, "use_sliding_window must be true or false, got 'yes'"),
        ({"use_sliding_window": True, "sliding_window": "8"}, "sliding_window must be a positive integer or null"),
        ({"max_window_layers": "1"}, "max_window_layers must be a non-negative integer, got '1'"),
    )
    def test_refuses_windows(self, fields, message):
        with pytest.raises(ValueError, match=message):
            of("qwen3", **fields)

    def test_embeddings_that_depend_on_the_context(self):
        """Files say them in several ways; what a context may be is declared before anything is rotated."""
        config = of("llama", max_position_embeddings=4096, rope_scaling={"type": "dynamic", "factor": 2.0})
        assert config.rope == RopeConfig(
            rope_type="dynamic", factor=2.0, original_max_positions=4096, context=4096, theta=config.rope.theta
        )
        longer = config.with_context(16384)
        assert (longer.max_positions, longer.rope.context, longer.rope.original_max_positions) == (16384, 16384, 4096)
        factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        fields = {"max_position_embeddings": 131072, "head_dim": 16}
        inside = of(
            "llama",
            **fields,
            rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 4096} | factors,
        )
        outside = of("llama", **fields, original_max_position_embeddings=4096, rope_scaling={"type": "su"} | factors)
        assert inside == outside
        assert (inside.rope.factor, inside.rope.context) == (32.0, 131072)
        assert inside.with_context(4096).rope.context == 4096
        with pytest.raises(ValueError, match="4096 at top level and 8192 inside"):
            of(
                "llama",
                **fields,
                original_max_position_embeddings=4096,
                rope_scaling={"type": "su", "original_max_position_embeddings": 8192} | factors,
            )
        with pytest.raises(ValueError, match=r"rope.long_factor must have head_dim / 2 = 16 entries: 8"):
            of(
                "llama",
                **fields | {"head_dim": 32},
                original_max_position_embeddings=4096,
                rope_scaling={"type": "su"} | factors | {"short_factor": [1.0] * 16},
            )
        with pytest.raises(ValueError, match="exceeds the model's 131072"):
            inside.with_context(131073)
        with pytest.raises(ValueError, match="must be a positive integer, got 0"):
            inside.with_context(0)
        with pytest.raises(ValueError, match=r"rope.context is 5, expected max_positions = 4096"):
            dataclasses.replace(config, rope=dataclasses.replace(config.rope, context=5))

    @parameterized.parameters("llama", "mistral", "qwen2", "qwen3")
    def test_every_field_that_is_read_changes_the_model_or_is_an_error(self, family):
        yarn = {"rope_type": "yarn", "factor": 4.0}
        base = {"head_dim": 16, "rope_scaling": yarn, "sliding_window": 8, "use_sliding_window": True}
        base |= {"max_window_layers": 1}
        flips = {
            "vocab_size": 101, "hidden_size": 128, "intermediate_size": 97, "num_hidden_layers": 3,
            "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True,
            "sliding_window": 9, "use_sliding_window": False, "max_window_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"], "rope_theta": 5e5,
            "rope_scaling": yarn | {"factor": 8.0}, "original_max_position_embeddings": 512,
            "rope_parameters": yarn | {"rope_theta": 5e5},
        }  # fmt: skip
        wrong = {"hidden_act": "gelu", "rope_interleaved": True, "partial_rotary_factor": 0.5}
        known = {*config_module._COMMON, *config_module.ROPE_PLACES, *config_module._FAMILIES[family]}
        assert known <= flips.keys() | wrong.keys()
        base = {name: value for name, value in base.items() if name in known}
        for name in known:
            if name in wrong:
                with pytest.raises(ValueError, match=f"{name} = .* is not supported"):
                    of(family, **base | {name: wrong[name]})
            else:
                change = {name: flips[name]} | ({"rope_scaling": None} if name == "rope_parameters" else {})
                assert of(family, **base | change) != of(family, **base), name
        for name in flips.keys() - known:
            with pytest.raises(ValueError, match=f"does not know for model_type '{family}': {name}"):
                of(family, **base | {name: flips[name]})

    def test_null_is_absent(self):
        names = ("tie_word_embeddings", "attention_bias", "mlp_bias", "rope_scaling", "rope_theta", "head_dim")
        assert of("llama", **dict.fromkeys(names)) == of("llama")

    def test_window_without_size(self):
        """Implementations assume the window of one particular checkpoint where a file leaves it out."""
        for family, fields in (("mistral", {}), ("qwen2", {"use_sliding_window": True})):
            with pytest.raises(ValueError, match=r"missing fields: sliding_window \(null for none\)"):
                of(family, **fields)
        with pytest.raises(ValueError, match="no sliding_window is in use"):
            of("qwen2", layer_types=["sliding_attention"] * 2)
        with pytest.raises(ValueError, match="layer_types must have 2 entries"):
            of("qwen2", layer_types=["full_attention"])
        with pytest.raises(ValueError, match="chunked_attention"):
            of("qwen2", layer_types=["full_attention", "chunked_attention"])


class ConstructionTest(parameterized.TestCase):
    @parameterized.parameters(
        ({"num_heads": 3}, "num_heads .3. must be a multiple of num_kv_heads .2."),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"vocab_size": 0, "num_layers": 2.0}, "vocab_size must be a positive integer, got 0; num_layers"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"qk_norm": 1}, "qk_norm must be true or false"),
        ({"windows": (None,)}, "windows must have 2 entries"),
        ({"windows": (0, None)}, "windows must be positive"),
    )
    def test_names_what_is_wrong(self, fields, message):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(dummy_config(), **fields)

    @parameterized.parameters(
        ({"rope_type": "su"}, "'su' is not supported"),
        ({"angles": "float32"}, 'angles must be "reference" or "exact"'),
        ({"factor": 2.0}, "factor is not used by this type"),
        ({"rope_type": "linear", "factor": 0.0}, "factor must be a positive finite number"),
        ({"rope_type": "yarn", "factor": 2.0}, "original_max_positions is missing"),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_positions": 9, "theta": 1.0}, "theta must exceed 1"),
        (LONGROPE | {"long_factor": (0.0,)}, "long_factor must be a tuple of positive finite numbers"),
        (LONGROPE | {"original_max_positions": 1}, "original_max_positions must exceed 1, got 1"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}, "beta_fast is not used"),
    )
    def test_rope(self, fields, message):
        with pytest.raises(ValueError, match=message):
            RopeConfig(**fields)

    def test_llama3_band(self):
        with pytest.raises(ValueError, match="high_freq_factor must exceed"):
            RopeConfig(
                rope_type="llama3", factor=8, original_max_positions=8, low_freq_factor=2.0, high_freq_factor=2.0
            )
