"""Reference logits: what is read, what agrees, and that every kind of mistake is seen and named."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from certjax.models import selfcheck
from certjax.models.dummy import dummy_config, dummy_model, dummy_tensors
from certjax.models.llama import LlamaConfig, RopeConfig, params_from_tensors
from certjax.models.safetensors import read_safetensors
from certjax.models.selfcheck import check_logits, read_fingerprint

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
CONFIG = dummy_config()
PARAMS = params_from_tensors(CONFIG, dummy_tensors(CONFIG))
IDS = np.random.default_rng(7).integers(0, CONFIG.vocab_size, 9).astype(np.int32)


def golden(family):
    source = read_safetensors(GOLDEN / family)
    config = LlamaConfig.from_hf(source.config)
    return params_from_tensors(config, source.tensors), config


def forward(*ids):
    """Logits after every token; one shape for all lengths."""
    padded = np.array([[*ids, *[0] * (11 - len(ids))]], np.int32)
    return np.asarray(dummy_model()(padded)[0], np.float64)[: len(ids)]


def answers():
    """All arrays of the numbered kind, from the model itself."""
    logits = forward(*IDS)
    top = np.argsort(-logits[-1])[:5]
    nll = np.log(np.exp(logits).sum(-1))[:-1] - logits[np.arange(8), IDS[1:]]
    longer = IDS.tolist()
    for _ in range(3):
        longer.append(int(np.argmax(forward(*longer)[-1])))
    return {"ids_0": IDS, "top_ids_0": top, "top_logits_0": logits[-1, top], "nll_0": nll, "greedy_ids_0": longer}


def write(path, arrays, **changes):
    arrays = {name: array for name, array in (arrays | changes).items() if array is not None}
    if path.suffix == ".json":
        path.write_text(json.dumps({name: np.asarray(array).tolist() for name, array in arrays.items()}))
    else:
        np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("name", ["f.npz", "f.json"])
def test_numbered_prompts(tmp_path, name):
    fingerprint = read_fingerprint(write(tmp_path / name, answers()), CONFIG)
    found = check_logits(PARAMS, CONFIG, fingerprint)
    assert found.keys() == {"top_logits_0", "top_ids_0", "nll_0", "greedy_ids_0"}
    assert all(error <= allowed == 5e-5 * fingerprint.scale for error, allowed in found.values())


def other_token(arrays):
    """Another third token, with the rest of the continuation as it would be read."""
    return [*arrays["greedy_ids_0"][:-1], (arrays["greedy_ids_0"][-1] + 1) % CONFIG.vocab_size]


def changed(arrays, name):
    array = np.array(arrays[name], np.float64 if "ids" not in name else np.int32)
    if name == "greedy_ids_0":
        array[-1] = (array[-1] + 1) % CONFIG.vocab_size
    elif name == "top_ids_0":  # the fifth is said to be the fourth again
        array[4] = array[3]
        arrays["top_logits_0"][4] = arrays["top_logits_0"][3]
    else:
        array[3] += 0.02
    return arrays | {name: array}


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("top_logits_0", r"token 8 of ids_0 \(position 8\), entry 3: expected"),
        ("top_ids_0", r"token 8 of ids_0 \(position 8\): expected"),
        ("nll_0", r"token 3 of ids_0 \(position 3\): expected"),
        ("greedy_ids_0", r"token 10 of greedy_ids_0 \(position 10\): expected 0, got"),
    ],
)
def test_every_array_counts(tmp_path, name, where):
    fingerprint = read_fingerprint(write(tmp_path / "f.npz", changed(answers(), name)), CONFIG)
    with pytest.raises(
        ValueError, match=rf"f\.npz: the model does not .*: {name} differs by up to .*, after {where}"
    ) as e:
        check_logits(PARAMS, CONFIG, fingerprint)
    assert str(e.value).count("agrees within") == 3


# Pitfall 12: invisible among the first tokens, but for a tolerance that is as tight as float32 allows.
def test_a_wrong_rotary_embedding_shows_far_apart_and_is_suspected():
    params, config = golden("llama31")
    fingerprint = read_fingerprint(GOLDEN / "llama31" / "golden.npz", config)
    unscaled = dataclasses.replace(config, rope=RopeConfig(theta=config.rope.theta))
    with pytest.raises(ValueError, match=r"logits differs by up to \d.*; logits_at_positions differs") as caught:
        check_logits(params, unscaled, fingerprint)
    assert "suspect" not in str(caught.value)
    factor = dataclasses.replace(config, rope=dataclasses.replace(config.rope, factor=8.01))
    with pytest.raises(
        ValueError, match=r"logits_at_positions differs by up to \d.*after token \d+ of row \d"
    ) as caught:
        check_logits(params, factor, fingerprint)
    assert "logits agrees within" in str(caught.value)
    assert "contiguous positions are right, so suspect the rotary embedding" in str(caught.value)


def test_angles_are_those_of_the_reference():
    params, config = golden("llama_yarn")
    exact = dataclasses.replace(config, rope=dataclasses.replace(config.rope, angles="exact"))
    check_logits(params, exact, read_fingerprint(GOLDEN / "llama_yarn" / "golden.npz", exact))


def test_a_wrong_weight_is_not_blamed_on_the_rotary_embedding():
    params, config = golden("qwen3")
    fingerprint = read_fingerprint(GOLDEN / "qwen3" / "golden.npz", config)
    params["layers"]["1"]["up"]["kernel"][3, 5] += 0.5
    with pytest.raises(ValueError, match="logits differs") as caught:
        check_logits(params, config, fingerprint)
    assert "suspect" not in str(caught.value)
    params["layers"]["1"]["up"]["kernel"][3, 5] = np.nan
    with pytest.raises(ValueError, match="logits differs by up to inf"):
        check_logits(params, config, fingerprint, tolerance=1e9)


def test_16_bit_parameters_have_their_rounding():
    params, config = golden("qwen2")
    fingerprint = read_fingerprint(GOLDEN / "qwen2" / "golden.npz", config)
    for dtype, least in (("float16", 1e-4), ("bfloat16", 1e-3)):
        found = check_logits(jax.tree.map(lambda a, d=dtype: jax.numpy.asarray(a, d), params), config, fingerprint)
        for error, allowed in found.values():
            assert least < error < allowed == selfcheck.TOLERANCES[dtype] * fingerprint.scale


def test_embeddings_that_depend_on_the_context_get_the_prompts_own(tmp_path):
    rope = RopeConfig(
        rope_type="longrope", factor=64.0, original_max_positions=64, context=4096, short_factor=(1.0,) * 8,
        long_factor=tuple(float(j + 1) for j in range(8)),
    )  # fmt: skip
    config = dummy_config(rope=rope)
    positions = np.arange(9, dtype=np.int32)[None] * 400
    short = dummy_model(config.with_context(9))(IDS[None])
    long = dummy_model(config)(IDS[None], positions)
    file = write(
        tmp_path / "f.npz",
        {"input_ids": IDS[None], "logits": short, "positions": positions, "logits_at_positions": long},
    )
    check_logits(PARAMS, config, read_fingerprint(file, config))
    assert np.abs(dummy_model(config)(IDS[None]) - short).max() > 0.01


BATCH = {"input_ids": IDS[None], "logits": np.ones((1, 9, 64))}
FAR = {"input_ids": IDS[None], "positions": IDS[None], "logits_at_positions": np.ones((1, 9, 64))}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({}, r"no logits to compare; expected input_ids with logits"),
        ({"input_ids": IDS[None]}, r"not known here or without their partners: input_ids"),
        (BATCH | {"extra": [1]}, r"not known here or without their partners: extra"),
        (BATCH | {"logits": np.ones((1, 9, 63))}, r"logits must be .*of shape \[1, 9, 64\], got float64 \[1, 9, 63\]"),
        (BATCH | {"logits": np.full((1, 9, 64), np.nan)}, r"logits must hold finite numbers"),
        (BATCH | {"input_ids": IDS}, r"input_ids must be .*integers of shape \['any', 'any'\], got int\d\d \[9\]"),
        (BATCH | {"input_ids": IDS[None] * 1.0}, r"input_ids must be an array of integers .*got float64"),
        (BATCH | {"input_ids": IDS[None] + 64}, r"input_ids must hold integers from 0 to 63 for this model, got"),
        (FAR | {"positions": IDS[None] + 4096}, r"positions must hold integers from 0 to 4095"),
        (FAR | {"positions": None}, r"positions must be an array of integers of shape \[1, 9\], got nothing"),
        ({"ids_0": IDS, "nll_0": np.ones(9)}, r"nll_0 must be .*of shape \[8\], got float64 \[9\]"),
        ({"ids_0": IDS, "nll_0": np.ones(8)}, r"no logits to compare"),
        ({"ids_0": IDS, "greedy_ids_0": IDS}, r"greedy_ids_0 must begin with ids_0 and go on"),
        ({"top_ids_0": [1], "top_logits_0": [1.0]}, r"without their partners: top_ids_0, top_logits_0"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit(tmp_path, arrays, message):
    for name in ("f.npz", "f.json"):
        file = write(tmp_path / name, arrays)
        with pytest.raises(ValueError, match=rf"{name}: .*{message}"):
            read_fingerprint(file, CONFIG)


def test_far_apart_positions_and_windows(tmp_path):
    with pytest.raises(ValueError, match=r"sliding windows: implementations differ"):
        read_fingerprint(write(tmp_path / "f.npz", FAR), dummy_config(windows=(4, None)))


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", b"[1]", b"{", b'{"ids_0": [[1], [1, 2]]}', b"\xff\xfe"])
def test_other_files(tmp_path, content):
    (tmp_path / "f").write_bytes(content)
    for path in (tmp_path / "f", tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"not a fingerprint, neither \.npz nor a JSON object of arrays"):
            read_fingerprint(path, CONFIG)
