"""Safetensors folders as hub clients leave them, whole, sharded and damaged."""

import hashlib
import json
import shutil
from pathlib import Path

import chex
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from certjax.models import open_source
from certjax.models.gguf import read_gguf
from certjax.models.safetensors import read_safetensors
from certjax.models.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tiny"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path):
    """A writable copy of a tiny model."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen2" / name, tmp_path / name)
    return tmp_path


def shard(folder):
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i, part in enumerate((names[:7], names[7:])):
        weight_map |= dict.fromkeys(part, f"model-{i}.safetensors")
        save_file({name: tensors[name] for name in part}, folder / f"model-{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


def materialised(source):
    return {name: np.asarray(tensor) for name, tensor in source.tensors.items()}


@pytest.mark.parametrize("family", sorted(path.name for path in GOLDEN.iterdir()))
def test_reads_folder_and_file_alike(family):
    truth = load_file(GOLDEN / family / "model.safetensors")
    for path in (GOLDEN / family, GOLDEN / family / "model.safetensors"):
        source = read_safetensors(path)
        chex.assert_trees_all_equal(materialised(source), truth, strict=True)
        assert source.config == json.loads((GOLDEN / family / "config.json").read_text())
        assert {name: t.shape for name, t in source.tensors.items()} == {k: v.shape for k, v in truth.items()}
        assert source.files == (GOLDEN / family / "model.safetensors",)
        assert source.tokenizer is None
        assert "tokenizer.json does not exist" in source.messages[0]


def test_shards(folder):
    truth = shard(folder)
    for path in (folder, folder / INDEX):
        source = read_safetensors(path)
        chex.assert_trees_all_equal(materialised(source), truth, strict=True)
        assert [file.name for file in source.files] == ["model-0.safetensors", "model-1.safetensors"]


def as_a_hub_client_leaves_it(folder, root):
    """A cache: blobs under digests, a snapshot of links to them, and whatever else the repository holds."""
    blobs, snapshot = root / "blobs", root / "snapshots" / "0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs\n")
    (folder / "README.md").write_text("# model")
    (folder / "pytorch_model.bin").write_bytes(b"PK old weights")
    (folder / "original").mkdir()
    shutil.copy(folder / "config.json", folder / "original" / "params.json")
    save_file({"tok_embeddings.weight": np.ones((2, 2), np.float32)}, folder / "original" / "consolidated.safetensors")
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        blob = blobs / hashlib.sha256(str(file).encode()).hexdigest()
        file.rename(blob)
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(blob)
    return snapshot


@pytest.mark.parametrize("sharded", [False, True])
def test_the_cache_of_a_hub_client(tmp_path, sharded):
    downloaded = tmp_path / "downloaded"
    downloaded.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "qwen2" / name, downloaded / name)
    truth = shard(downloaded) if sharded else load_file(downloaded / "model.safetensors")
    snapshot = as_a_hub_client_leaves_it(downloaded, tmp_path / "models--x--y")
    weights = sorted(snapshot.glob("*.safetensors"))
    for path in (snapshot, snapshot / INDEX if sharded else weights[0]):
        source = open_source(path)
        chex.assert_trees_all_equal(materialised(source), truth, strict=True)
        assert sorted(source.files) == weights
    weights[-1].resolve().unlink()  # a download that was interrupted leaves a link to nothing
    with pytest.raises(
        ValueError, match=f"{weights[-1].name}.*(missing|not a whole)|1 of 2 shards are missing: {weights[-1].name}"
    ):
        open_source(snapshot)


def test_one_file_of_another_name(folder):
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert len(read_safetensors(folder).tensors) == len(load_file(folder / "weights.safetensors"))


# Pitfall 22.
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_dtypes(tmp_path, dtype):
    truth = np.arange(-4, 4).reshape(2, 4).astype(dtype)
    save_file({"w": truth}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    tensor = read_safetensors(tmp_path).tensors["w"]
    assert (tensor.dtype, tensor.size) == (truth.dtype, 8)
    chex.assert_trees_all_equal(np.asarray(tensor), truth, strict=True)
    chex.assert_trees_all_equal(np.asarray(tensor, np.float32), truth.astype(np.float32), strict=True)


def test_values_beyond_the_dtype(tmp_path):
    save_file({"w": np.array([1.0, 7e4, np.nan], np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    tensor = read_safetensors(tmp_path).tensors["w"]
    with pytest.raises(ValueError, match=r"'w' holds values up to 7e\+04, too large for float16"):
        np.asarray(tensor, np.float16)


def damage_index(folder, change):
    index = folder / INDEX
    content = json.loads(index.read_text())
    change(content["weight_map"])
    index.write_text(json.dumps(content))


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


DAMAGE = {
    "missing config": (lambda d: (d / "config.json").unlink(), r"config\.json: no such file"),
    "bad config": (lambda d: (d / "config.json").write_text("{"), r"config\.json: cannot be read as JSON"),
    "list config": (lambda d: (d / "config.json").write_text("[]"), r"config\.json: holds a JSON list, expected"),
    "truncated": (lambda d: cut(d / "model-1.safetensors", -5), r"model-1\.safetensors: not a whole safetensors file"),
    "header only": (lambda d: cut(d / "model-1.safetensors", 20), r"model-1\.safetensors: not a whole"),
    "empty": (lambda d: cut(d / "model-1.safetensors", 0), r"model-1\.safetensors: not a whole safetensors file"),
    "garbage": (lambda d: (d / "model-0.safetensors").write_bytes(b"\xff" * 99), r"model-0\.safetensors: not a whole"),
    "missing shard": (lambda d: (d / "model-1.safetensors").unlink(), r"1 of 2 shards are missing: model-1"),
    "bad index": (lambda d: (d / INDEX).write_text("{}"), r"json: expected an object 'weight_map'"),
    "outside": (lambda d: damage_index(d, lambda m: m.update(x="../x.safetensors")), r"file names in the same folder"),
    "not inside": (lambda d: damage_index(d, lambda m: m.update(x="model-0.safetensors")), r"not in it: x"),
    "no index": (lambda d: (d / INDEX).unlink(), r"2 \.safetensors files and no model\.safet"),
    "bad tokenizer": (lambda d: (d / "tokenizer.json").write_text("{}"), r"tokenizer\.json: not a tokenizer"),
    "bad end": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "x"}'),
        r"eos_token_id must be an integer or a list",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_clear_error(folder, name):
    damage, message = DAMAGE[name]
    shard(folder)
    damage(folder)
    with pytest.raises(ValueError, match=message):
        read_safetensors(folder)


def test_integer_tensors_are_refused(tmp_path):
    save_file({"w": np.ones(2, np.int32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"'w' is of type I32, expected one of F32, F16, BF16, F64"):
        read_safetensors(tmp_path)
    with pytest.raises(ValueError, match=r"no such file or folder"):
        read_safetensors(tmp_path / "nowhere")


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
}


@pytest.mark.parametrize(
    ("files", "processor", "expected"),
    [
        ({}, None, (1, [2], False, None)),  # what config.json says
        (
            {"tokenizer_config": {"bos_token": "<|begin|>", "add_bos_token": True}, "config": {}},
            None,
            (0, [], True, None),
        ),
        ({"tokenizer_config": {"bos_token": {"content": "<|begin|>"}}, "config": {}}, TEMPLATE, (0, [], True, None)),
        (
            {"tokenizer_config": {"bos_token": "<|begin|>", "add_bos_token": False}, "config": {}},
            TEMPLATE,
            (0, [], False, None),
        ),
        ({"tokenizer_config": {"eos_token": "<|end|>", "chat_template": "x"}}, None, (1, [1, 2], False, "x")),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}}, None, (1, [1, 2], False, None)),
        ({"generation_config": {"eos_token_id": [5, 2], "bos_token_id": 7}}, None, (7, [2, 5], False, None)),
        (
            {
                "tokenizer_config": {
                    "chat_template": [{"name": "t", "template": "a"}, {"name": "default", "template": "b"}]
                }
            },
            None,
            (1, [2], False, "b"),
        ),
    ],
)
def test_tokenizer_config(folder, write_gguf, files, processor, expected):
    tokenizer = read_gguf(write_gguf("llama").path).tokenizer
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"post_processor": processor}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    source = read_safetensors(folder)
    *found, eos_token = source.tokenizer_config.values()
    assert tuple(found) == expected
    assert eos_token == ("<|end|>" if "eos_token" in files.get("tokenizer_config", {}) else None)
    assert source.messages == ()
    ids = Tokenizer(source.tokenizer, source.tokenizer_config).encode("hello")
    assert ids.count(expected[0]) == expected[2]


def test_template_file_wins(folder):
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (folder / "chat_template.jinja").write_text("new")
    assert read_safetensors(folder).tokenizer_config["chat_template"] == "new"
