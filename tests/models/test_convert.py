"""Conversion from every download format, and what it refuses."""

import errno
import importlib
import json
import os
import re
import shutil
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from safetensors.numpy import load_file, save_file

from certjax.eval import cli
from certjax.models import checkpoints
from certjax.models.convert import convert, open_source
from certjax.models.llama.config import LlamaConfig
from certjax.models.llama.params import params_from_tensors

convert_module = importlib.import_module("certjax.models.convert")  # the package's `convert` is the function
GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
FAMILIES = sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("family", FAMILIES)
def test_converted_model_has_the_reference_logits(tmp_path, family):
    summary = convert(GOLDEN / family, tmp_path / "model", check=GOLDEN / family / "golden.npz")
    loaded = checkpoints.load(tmp_path / "model")
    assert summary.model_type == loaded.config["model_type"]
    assert summary.parameters == sum(a.size for a in load_file(GOLDEN / family / "model.safetensors").values())
    assert summary.target == tmp_path / "model"
    assert "no tokenizer" in summary.messages[0]
    found = re.search(r"logits are those of .*golden\.npz: largest difference (\d[\d.e-]*)", summary.messages[1])
    assert float(found[1]) < 1e-4
    assert loaded.fingerprint == summary.fingerprint


def test_a_model_with_other_logits_is_not_kept(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "qwen2", source)
    reference = source / "golden.npz"
    convert(source, tmp_path / "model", dtype="bfloat16", check=reference)
    fingerprint = checkpoints.load(tmp_path / "model").fingerprint
    # Invisible at contiguous positions of a short prompt, if it were not for the tolerance of float32.
    parameters = json.loads((source / "config.json").read_text())["rope_parameters"]
    change_config(source, rope_parameters=parameters | {"rope_theta": 1.01e6})
    with pytest.raises(
        ValueError, match=r"the model does not have the reference's logits .*logits_at_positions differs"
    ):
        convert(source, tmp_path / "model", check=reference, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["model", "source"]
    assert checkpoints.load(tmp_path / "model").fingerprint == fingerprint
    with pytest.raises(ValueError, match=r"nothing\.npz: not a fingerprint"):
        convert(source, tmp_path / "other", check=source / "nothing.npz")
    assert sorted(os.listdir(tmp_path)) == ["model", "source"]


def test_gguf(tmp_path, write_gguf):
    file = write_gguf("llama", kind=GGMLQuantizationType.Q8_0)
    summary = convert(file.path, tmp_path / "model", dtype="bfloat16")
    loaded = checkpoints.load(tmp_path / "model")
    source = open_source(file.path)
    expected = params_from_tensors(LlamaConfig.from_hf(source.config), source.tensors, jnp.bfloat16)
    chex.assert_trees_all_equal(loaded.params, expected, strict=True)
    assert (loaded.config, loaded.tokenizer) == (source.config, source.tokenizer)
    assert loaded.tokenizer_config == source.tokenizer_config
    assert (summary.dtype, summary.messages) == ("bfloat16", ())


def test_progress_and_overwriting(tmp_path):
    seen = []
    reference = GOLDEN / "llama2" / "golden.npz"
    convert(GOLDEN / "llama2", tmp_path / "model", check=reference, progress=lambda *told: seen.append(told))
    count = len(load_file(GOLDEN / "llama2" / "model.safetensors"))
    assert seen[:count] == [("reading tensors", i + 1, count) for i in range(count)]
    stages = ["reading tensors", "hashing MB", "writing MB", "reading back MB", "checking prompts"]
    assert list(dict.fromkeys(stage for stage, _, _ in seen)) == stages
    for stage in stages:
        assert [done for name, done, _ in seen if name == stage][-1] == next(n for name, _, n in seen if name == stage)
    with pytest.raises(ValueError, match=r"give overwrite=True \(--overwrite on the command line\) to replace it"):
        convert(GOLDEN / "qwen3", tmp_path / "model")
    convert(GOLDEN / "qwen3", tmp_path / "model", overwrite=True)
    assert checkpoints.load(tmp_path / "model").config["model_type"] == "qwen3"


def test_fingerprint_tells_files_apart(tmp_path):
    prints = [convert(GOLDEN / name, tmp_path / name).fingerprint for name in ("llama2", "qwen3")]
    prints.append(convert(GOLDEN / "llama2", tmp_path / "again").fingerprint)
    assert prints[0] == prints[2] != prints[1]


# Pitfall 20: an output projection that is absent, present, or present and another than the flag says.
def test_tied_embeddings_in_files(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "qwen2", source)
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    absent = convert(source, tmp_path / "absent")
    change_tensors(source, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    present = convert(source, tmp_path / "present", check=source / "golden.npz")
    assert present.parameters == absent.parameters
    change_tensors(source, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs.*set tie_word_embeddings to false"):
        convert(source, tmp_path / "other")
    change_config(source, tie_word_embeddings=False)
    separate = convert(source, tmp_path / "separate")
    assert separate.parameters == absent.parameters + embedding.size


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (lambda d: change_config(d, model_type="gpt2"), {}, r"model_type 'gpt2' is not supported"),
        (lambda d: change_config(d, surprise=1), {}, r"surprise"),
        (lambda d: change_tensors(d, lambda t: t.pop("model.norm.weight")), {}, r"missing model\.norm\.weight"),
        (lambda d: change_tensors(d, lambda t: t.update(extra=np.ones(2))), {}, r"not used: extra"),
        (
            lambda d: change_tensors(d, lambda t: t.update({"model.norm.weight": np.full(64, 1e5, np.float32)})),
            {"dtype": "float16"},
            r"'model\.norm\.weight' holds values up to 1e\+05, too large for float16",
        ),
        (lambda d: None, {"dtype": "int8"}, r"dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        (lambda d: os.truncate(d / "model.safetensors", 999), {}, r"not a whole safetensors file"),
    ],
)
def test_refusals_leave_nothing(tmp_path, damage, options, message):
    source = tmp_path / "source"
    shutil.copytree(GOLDEN / "llama2", source)
    damage(source)
    with pytest.raises(ValueError, match=message):
        convert(source, tmp_path / "model", **options)
    assert os.listdir(tmp_path) == ["source"]


def test_content_decides(tmp_path, write_gguf):
    shutil.copy(write_gguf("qwen2").path, tmp_path / "model.bin")
    assert open_source(tmp_path / "model.bin").config["model_type"] == "qwen2"
    with pytest.raises(ValueError, match=r"no safetensors in this folder"):
        open_source(tmp_path)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen3" / name, tmp_path / name.replace("model.safetensors", "weights"))
    assert open_source(tmp_path / "weights").config["model_type"] == "qwen3"


def test_what_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "model").write_bytes(b"GGUF" * 4)

    # A folder is the one thing that no user, root included, can read as a file.
    with pytest.raises(ValueError, match=rf"{tmp_path}: cannot be read: Is a directory"):
        convert_module._fingerprint([tmp_path])

    def refuse(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(ValueError, match=r"model: cannot be read: Input/output error"):
        open_source(tmp_path / "model")


def test_what_is_not_a_model(tmp_path, write_gguf):
    with pytest.raises(ValueError, match=r"no such file or folder; expected a GGUF file"):
        open_source(tmp_path / "nowhere")
    (tmp_path / "text").write_text("hello, world")
    (tmp_path / "empty").touch()
    for name in ("text", "empty"):
        with pytest.raises(ValueError, match=r"not a model file known here.*expected a GGUF file"):
            open_source(tmp_path / name)
    shutil.copy(write_gguf("qwen2").path, tmp_path / "q.gguf")
    with pytest.raises(ValueError, match=r"no safetensors in this folder.*it holds q\.gguf"):
        open_source(tmp_path)
    convert(tmp_path / "q.gguf", tmp_path / "done")
    with pytest.raises(ValueError, match=r"already a certjax checkpoint; open it with"):
        open_source(tmp_path / "done")


def test_the_command(tmp_path, capsys):
    for reference, status in (("llama2", 0), ("llama31", 1)):
        words = ["convert", GOLDEN / "llama2", tmp_path / reference, "--check", GOLDEN / reference / "golden.npz"]
        assert cli._main(cli._parser().parse_args([str(word) for word in words])) == status
        errors = capsys.readouterr().err
        assert "checking prompts: 4/4" in errors
        assert ("logits are those of" in errors) == (status == 0)
        assert ("logits differs by up to" in errors.splitlines()[-1]) == (status == 1)
    assert os.listdir(tmp_path) == ["llama2"]
