"""Checkpoints: whole or absent, readable, on any number of devices, and damage is named."""

import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from certjax.models import checkpoints

CONFIG = {"model_type": "llama", "vocab_size": 8}
TOKENS = {"bos_token_id": 1, "eos_token_id": [2], "add_bos_token": True, "chat_template": "é"}


def tree(dtype=np.float32):
    rng = np.random.default_rng(0)

    def array(*shape):
        return rng.standard_normal(shape).astype(dtype)

    layers = {str(i): {"query": {"kernel": array(8, 12)}, "norm": {"scale": array(8)}} for i in (0, 1, 10)}
    return {"embedding": array(16, 8), "layers": layers}


def save(path, params=None, **options):
    checkpoints.save(
        path, tree() if params is None else params, CONFIG, {"version": "1.0"}, TOKENS, "sha256:0", **options
    )
    return path


def sharded(params):
    """Largest axis over four devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",))
    return jax.tree.map(
        lambda a: NamedSharding(
            mesh, PartitionSpec(*("x" if i == np.argmax(a.shape) else None for i in range(a.ndim)))
        ),
        params,
    )


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_round_trip(tmp_path, dtype):
    params = tree(dtype)
    loaded = checkpoints.load(save(tmp_path / "model", params))
    chex.assert_trees_all_equal(loaded.params, params, strict=True)
    assert (loaded.config, loaded.tokenizer, loaded.tokenizer_config) == (CONFIG, {"version": "1.0"}, TOKENS)
    assert loaded.fingerprint == "sha256:0"
    leaves = jax.tree.leaves(loaded.params)
    assert all(leaf.sharding == SingleDeviceSharding(jax.devices()[0]) for leaf in leaves)


def test_files_that_people_read(tmp_path):
    path = save(tmp_path / "model")
    assert json.loads((path / "config.json").read_text()) == CONFIG
    assert "é" in (path / "tokenizer_config.json").read_text(encoding="utf-8")
    assert json.loads((path / "manifest.json").read_text())["format_version"] == checkpoints.FORMAT_VERSION
    (path / "config.json").write_text('{"edited": true}')  # by hand, on purpose: a longer context, say
    assert checkpoints.load(path).config == {"edited": True}


def test_without_a_tokenizer(tmp_path):
    checkpoints.save(tmp_path / "model", tree(), CONFIG, None, TOKENS)
    loaded = checkpoints.load(tmp_path / "model")
    assert (loaded.tokenizer, loaded.fingerprint) == (None, None)


def test_dtype(tmp_path):
    loaded = checkpoints.load(save(tmp_path / "model"), dtype=jnp.bfloat16)
    expected = jax.tree.map(lambda a: a.astype(ml_dtypes.bfloat16), tree())
    chex.assert_trees_all_equal(loaded.params, expected, strict=True)


# Pitfall 24, with processes of one and of four devices in the last test.
def test_one_device_to_four_and_back(tmp_path):
    places = sharded(tree())
    on_four = checkpoints.load(save(tmp_path / "one"), sharding=places)
    chex.assert_trees_all_equal(on_four.params, tree(), strict=True)
    assert jax.tree.all(jax.tree.map(lambda a, place: a.sharding == place, on_four.params, places))
    assert {len(a.addressable_shards) for a in jax.tree.leaves(on_four.params)} == {4}
    back = checkpoints.load(save(tmp_path / "four", on_four.params))
    chex.assert_trees_all_equal(back.params, tree(), strict=True)
    assert {len(a.devices()) for a in jax.tree.leaves(back.params)} == {1}


def test_one_sharding_for_all(tmp_path):
    everywhere = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec())
    loaded = checkpoints.load(save(tmp_path / "model"), sharding=everywhere)
    chex.assert_trees_all_equal(loaded.params, tree(), strict=True)
    assert {a.sharding for a in jax.tree.leaves(loaded.params)} == {everywhere}


def test_sharding_that_does_not_fit(tmp_path):
    path = save(tmp_path / "model")
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
    with pytest.raises(ValueError, match=r"sharding of params\['embedding'\]: .*partitioned 3 times"):
        checkpoints.load(path, sharding=NamedSharding(mesh, PartitionSpec("x")))
    places = sharded(tree())
    del places["embedding"]
    with pytest.raises(ValueError, match=r"sharding: expected one, or a dict like the parameters"):
        checkpoints.load(path, sharding=places)


def test_overwrites_only_when_told_and_only_checkpoints(tmp_path):
    path = save(tmp_path / "model")
    other = jax.tree.map(lambda a: a + 1, tree())
    with pytest.raises(ValueError, match=r"already exists; give overwrite=True \(--overwrite on"):
        save(path, other)
    chex.assert_trees_all_equal(checkpoints.load(path).params, tree())
    save(path, other, overwrite=True)
    chex.assert_trees_all_equal(checkpoints.load(path).params, other)
    assert os.listdir(tmp_path) == ["model"]
    (tmp_path / "photos").mkdir()
    (tmp_path / "notes").write_text("x")
    for name in ("photos", "notes"):
        with pytest.raises(ValueError, match=r"already exists; it is not a certjax checkpoint"):
            save(tmp_path / name, overwrite=True)
    with pytest.raises(ValueError, match=r"the folder .*nowhere does not exist"):
        save(tmp_path / "nowhere" / "model")


@pytest.mark.parametrize("stage", ["orbax", "rename"])
def test_failure_leaves_nothing(tmp_path, monkeypatch, stage):
    def fail(*_, **__):
        raise OSError("disk full")

    if stage == "orbax":
        monkeypatch.setattr(checkpoints.ocp, "save", fail)
    else:
        monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ValueError, match=r"cannot be written: disk full"):
        save(tmp_path / "model")
    assert os.listdir(tmp_path) == []


def test_failed_overwriting_keeps_the_old_one(tmp_path, monkeypatch):
    path = save(tmp_path / "model")
    rename = Path.rename

    def fail_at_the_end(self, target):
        if target == path and not self.name.endswith(".old"):
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_end)
    with pytest.raises(ValueError, match=r"cannot be written: disk full"):
        save(path, jax.tree.map(lambda a: a + 1, tree()), overwrite=True)
    chex.assert_trees_all_equal(checkpoints.load(path).params, tree())
    assert os.listdir(tmp_path) == ["model"]


def test_unwritable_folder(tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)  # permissions do not bind every user who runs tests
    with pytest.raises(ValueError, match=r"model: cannot be written: .*Permission denied"):
        save(tmp_path / "model")


@pytest.mark.parametrize("params", [{}, {"layers": {0: np.ones(2)}}, {"layers": [np.ones(2)]}, {"": np.ones(2)}])
def test_trees_that_would_not_come_back(tmp_path, params):
    with pytest.raises(ValueError, match=r"expected nested dicts with string keys and arrays"):
        save(tmp_path / "model", params)
    assert os.listdir(tmp_path) == []


def test_not_a_checkpoint(tmp_path):
    assert not checkpoints.is_checkpoint(tmp_path)
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"not a certjax checkpoint: manifest\.json is missing"):
            checkpoints.load(path)


def test_newer_format(tmp_path):
    path = save(tmp_path / "model")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format_version": 2}))
    with pytest.raises(ValueError, match=r"checkpoint format 2, expected 1; upgrade certjax"):
        checkpoints.load(path)


def test_damage_to_any_file_is_named(tmp_path):
    path = save(tmp_path / "model")
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.parent != path)
    assert len(files) >= 7
    for file in [*files, path / "config.json", path / "tokenizer_config.json"]:
        whole = file.read_bytes()
        damaged = [None]
        if file.parent != path:
            middle = len(whole) // 2
            damaged += (
                [whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:-1]] if whole else [b"x"]
            )
        for content in damaged:
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with pytest.raises(ValueError, match=r"damaged checkpoint, missing or changed: ") as caught:
                checkpoints.load(path)
            assert file.relative_to(path).as_posix() in str(caught.value)
            file.write_bytes(whole)
    chex.assert_trees_all_equal(checkpoints.load(path).params, tree())


@pytest.mark.parametrize("content", ['{"format_version": 1}', '{"format_version": 1, "crc32": [1]}', "{", "[]", "{}"])
def test_damaged_manifest(tmp_path, content):
    path = save(tmp_path / "model")
    (path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"damaged checkpoint|cannot be read as JSON|holds a JSON list|format None"):
        checkpoints.load(path)


def test_a_process_of_one_device_loads_what_four_saved_saves_it_and_ends_quietly(tmp_path):
    places = sharded(tree())
    save(tmp_path / "four", jax.device_put(tree(), places))
    code = (
        "import jax, sys\n"
        "from certjax.models import checkpoints as c\n"
        "loaded = c.load(sys.argv[1])\n"
        "c.save(sys.argv[2], loaded.params, {}, None, {})\n"
        "print(jax.device_count(), {len(a.devices()) for a in jax.tree.leaves(loaded.params)})\n"
    )
    command = [sys.executable, "-W", "error", "-c", code, tmp_path / "four", tmp_path / "one"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env=os.environ | {"XLA_FLAGS": ""}, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 {1}\n", "")
    for options in ({}, {"sharding": places}):
        chex.assert_trees_all_equal(checkpoints.load(tmp_path / "one", **options).params, tree(), strict=True)


def test_progress_ends_at_all(tmp_path):
    params = {"layers": {str(i): {"w": np.full((1500, 1000), i, np.float32)} for i in range(4)}}
    saved, loaded = [], []
    save(tmp_path / "m", params, progress=lambda *told: saved.append(told))
    checkpoints.load(tmp_path / "m", progress=lambda *told: loaded.append(told))
    for seen in (saved, loaded):
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)
        assert seen[-1] == (48, 48)
    assert any(0 < done < 24 for done, _ in loaded)  # checksums
    assert len({done for done, _ in loaded if done > 24}) > 1  # parts of what is loaded for good


@pytest.mark.parametrize("call", ["is_dir", "exists"])
def test_a_target_that_cannot_be_looked_at(tmp_path, monkeypatch, call):
    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, call, refuse)
    with pytest.raises(ValueError, match=r"model: cannot be written: .*Permission denied"):
        checkpoints.check_target(tmp_path / "model")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"xxx: cannot be written: .*File name too long"):
        checkpoints.check_target(tmp_path / ("x" * 300))
