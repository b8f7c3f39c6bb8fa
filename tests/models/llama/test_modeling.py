import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import parameterized
from safetensors.numpy import load_file

from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import LlamaConfig, RopeConfig, load_model, params_from_tensors
from certjax.models.llama.rope import rotary_tables

GOLDEN = pathlib.Path(__file__).parents[2] / "golden" / "tiny"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())


IDS = np.random.default_rng(3).integers(0, 64, (2, 24)).astype(np.int32)


def model_config(family):
    return LlamaConfig.from_hf(json.loads((GOLDEN / family / "config.json").read_text()))


def model_params(family):
    return params_from_tensors(model_config(family), load_file(GOLDEN / family / "model.safetensors"))


def load(family):
    folder = GOLDEN / family
    model = load_model(model_params(family), model_config(family), attention="dense")
    with np.load(folder / "golden.npz") as golden:
        return model, dict(golden)


class GoldenTest(parameterized.TestCase):
    def test_all_families_are_here(self):
        assert len(FAMILIES) == 8

    # Pitfall 23: llama31 and qwen3 have a head_dim that is not hidden / heads.
    @parameterized.parameters(*FAMILIES)
    def test_logits(self, family):
        model, golden = load(family)
        np.testing.assert_allclose(model(golden["input_ids"]), golden["logits"], atol=1e-4)

    @parameterized.parameters(*(f for f in FAMILIES if f != "mistral_window"))
    def test_logits_far_apart(self, family):
        model, golden = load(family)
        ids, positions, expected = (golden[name] for name in ("input_ids", "positions", "logits_at_positions"))
        assert positions.max() > 120000
        np.testing.assert_allclose(model(ids, positions), expected, atol=1e-4)

        def other(**change):
            rope = dataclasses.replace(model.config.rope, **change)
            config = dataclasses.replace(model.config, rope=rope)
            return np.abs(np.asarray(load_model(model_params(family), config)(ids, positions)) - expected).max()

        # The reference's angles are off by up to half a float32 step of 10⁵ radians, 4e-3: exact ones differ by that.
        assert 1e-4 < other(angles="exact") < 2e-2
        assert other(theta=model.config.rope.theta * 1.001) > 0.1  # a mistake in the frequencies shows


# For every field a change that leaves the shapes of the weights alone; each must change the output.
BASE = {"windows": (20, None), "rope": RopeConfig(rope_type="linear", factor=2.0)}
FLIPS = {
    "norm_eps": 1e-1,
    "rope": RopeConfig(),
    "windows": (19, None),
    "num_heads": 2,  # with head_dim 32: the same widths, split differently
    "num_layers": 1,
}
SHAPE_FIELDS = {
    "vocab_size": 65,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_kv_heads": 1,
    "head_dim": 32,
    "tied_embeddings": True,
    "qkv_bias": True,
    "output_bias": True,
    "mlp_bias": True,
    "qk_norm": True,
}
ROPE_FLIPS = (
    ("default", {}, {"theta": 2e4}),
    ("linear", {"factor": 2.0}, {"factor": 4.0}),
    ("default", {}, {"angles": "exact"}),
    *(
        ("llama3", {"factor": 4.0, "original_max_positions": 64, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, flip)
        for flip in (
            {"factor": 8.0}, {"original_max_positions": 128}, {"low_freq_factor": 0.5}, {"high_freq_factor": 8.0}
        )
    ),
    *(
        ("yarn", {"factor": 4.0, "original_max_positions": 256}, flip)
        for flip in (
            {"factor": 8.0}, {"original_max_positions": 2048}, {"beta_fast": 8.0}, {"beta_slow": 8.0},
            {"attention_factor": 1.0},
        )
    ),
    *(
        ("dynamic", {"factor": 2.0, "original_max_positions": 256, "context": 1024}, flip)
        for flip in ({"factor": 4.0}, {"original_max_positions": 512}, {"context": 2048})
    ),
    *(
        (
            "longrope",
            {"factor": 4.0, "original_max_positions": 256, "context": context, "short_factor": (1.0,) * 8,
             "long_factor": (3.0,) * 8},
            flip,
        )
        for context, flip in (
            (1024, {"factor": 16.0}), (1024, {"original_max_positions": 1024}), (1024, {"context": 256}),
            (256, {"short_factor": (2.0,) * 8}), (1024, {"long_factor": (2.0,) * 8}), (256, {"attention_factor": 2.0}),
        )
    ),
)  # fmt: skip


class NoDeadFieldTest(parameterized.TestCase):
    def test_every_field_is_covered(self):
        fields = {field.name for field in dataclasses.fields(LlamaConfig)}
        assert fields == {*FLIPS, *SHAPE_FIELDS, "max_positions"}  # max_positions: test_generate.py
        flipped = {name for _, _, flip in ROPE_FLIPS for name in flip}
        assert {field.name for field in dataclasses.fields(RopeConfig)} == flipped | {"rope_type"}

    @parameterized.parameters(*FLIPS)
    def test_flip_changes_logits(self, name):
        base = dummy_config(**BASE)
        flip = {name: FLIPS[name]}
        if name == "num_layers":
            flip["windows"] = (20,)
        if name == "num_heads":
            flip |= {"head_dim": 32, "num_kv_heads": 1}
        changed = dummy_model(dummy_config(**BASE | flip))(IDS)
        assert np.abs(changed - dummy_model(base)(IDS)).max() > 0.001

    @parameterized.parameters(*SHAPE_FIELDS)
    def test_field_changes_the_weights(self, name):
        base = dummy_model(dummy_config(**BASE))
        changed = dummy_model(dummy_config(**BASE | {name: SHAPE_FIELDS[name]}))
        shapes = [jax.tree.map(jnp.shape, jax.tree.leaves(model)) for model in (base, changed)]
        assert shapes[0] != shapes[1]
        logits = changed(IDS)
        assert logits.shape[-1] == (65 if name == "vocab_size" else 64)
        if name != "vocab_size":
            assert np.abs(logits - base(IDS)).max() > 0.001

    def test_optional_weights_are_used(self):
        model = dummy_model(dummy_config(num_layers=1, qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True))
        before = model(IDS)
        for name in ("query", "key", "value", "output", "gate", "up", "down", "query_norm", "key_norm"):
            module = getattr(model.layers[0], name)
            variable = module.scale if name.endswith("norm") else module.bias
            saved = variable[...]
            variable[...] = saved * jnp.linspace(0.0, 2.0, saved.size)
            assert np.abs(model(IDS) - before).max() > 1e-3, name
            variable[...] = saved
        np.testing.assert_array_equal(model(IDS), before)

    @parameterized.parameters(*ROPE_FLIPS)
    def test_rope_field(self, rope_type, fields, flip):
        base = RopeConfig(rope_type=rope_type, **fields)
        changed = dataclasses.replace(base, **flip)
        tables = [np.stack(rotary_tables(rope, 16, jnp.arange(0, 131072, 257))) for rope in (base, changed)]
        assert np.abs(tables[0] - tables[1]).max() > (1e-3 if "angles" in flip else 1e-2)


class ConfigFileTest(parameterized.TestCase):
    # Pitfall 14: a base that is not read leaves the default one.
    def test_rope_theta_of_either_spelling_is_used(self):
        fields = {
            "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        }  # fmt: skip
        spellings = (
            lambda theta: {"rope_theta": theta},
            lambda theta: {"rope_parameters": {"rope_type": "default", "rope_theta": theta}},
            lambda theta: {"rope_theta": theta, "rope_scaling": None},
        )
        positions = 1000 + 7 * np.arange(24, dtype=np.int32)[None].repeat(2, 0)
        logits = [
            [dummy_model(LlamaConfig.from_hf(fields | spelling(theta)))(IDS, positions) for spelling in spellings]
            for theta in (10000.0, 500000.0)
        ]
        for same in logits:
            for other in same[1:]:
                np.testing.assert_array_equal(same[0], other)
        assert np.abs(logits[0][0] - logits[1][0]).max() > 0.1

    # Pitfall 16: whatever the dtype of the weights.
    def test_angles_are_float32_under_16_bit_weights(self):
        positions = jnp.array([[131071, 8192]])
        narrow, wide = (dummy_model(dtype=dtype).rotary(positions) for dtype in (jnp.bfloat16, jnp.float32))
        for ours, theirs in zip(narrow, wide, strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_array_equal(ours, theirs)


class WindowTest(parameterized.TestCase):
    # Pitfall 35.
    def test_window_counts_the_query_itself(self):
        """One layer, window 4, 6 tokens: changing token j changes the logits at 5 exactly for j ≥ 2."""
        model = dummy_model(dummy_config(num_layers=1, windows=(4,)))
        ids = np.array([[1, 2, 3, 4, 5, 6]], np.int32)
        before = model(ids)[0, 5]
        changed = []
        for j in range(6):
            other = ids.copy()
            other[0, j] = 40
            changed.append(bool(np.abs(model(other)[0, 5] - before).max() > 1e-4))
        assert changed == [False, False, True, True, True, True]

    def test_no_token_sees_the_future(self):
        model = dummy_model()
        other = IDS.copy()
        other[:, -1] = (other[:, -1] + 1) % 64
        np.testing.assert_array_equal(model(IDS)[:, :-1], model(other)[:, :-1])
