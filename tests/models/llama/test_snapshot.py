"""A context that is read once and asked many questions, and what a snapshot of another one says."""

import dataclasses
import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import Snapshot, decode, prefill, snapshot
from certjax.models.llama.snapshot import snapshot_name

RNG = np.random.default_rng(4)
PROMPTS = [RNG.integers(0, 64, n).tolist() for n in (70, 9)]
QUESTIONS = [[[5, 6, 7], [8]], [[9], [1, 2, 3]]]
KEY = jax.random.key(3)


@functools.cache
def model():
    return dummy_model(dummy_config(num_layers=1), attention="dense")


@pytest.fixture(scope="module")
def taken():
    return Snapshot.take(model(), PROMPTS, capacity=128, chunk=4)


@pytest.fixture(scope="module")
def folder(taken, tmp_path_factory):
    path = tmp_path_factory.mktemp("snapshots") / "one"
    taken.save(path)
    return path


def test_every_question_is_answered_as_if_everything_had_been_read(taken, folder):
    for held in (taken, Snapshot.load(folder, model(), PROMPTS)):
        for more in QUESTIONS:
            result, _ = decode(model(), *held.resume(model(), more), max_new_tokens=4, rng=KEY)
            whole = [prompt + question for prompt, question in zip(PROMPTS, more, strict=True)]
            read = prefill(model(), whole, model().init_caches(2, 128), chunk=4)
            chex.assert_trees_all_equal(result.tokens, decode(model(), *read, max_new_tokens=4, rng=KEY)[0].tokens)


def test_every_bit_comes_back(taken, folder):
    back = Snapshot.load(folder, model().with_attention("certified"))
    chex.assert_trees_all_equal((back.logits, back.caches), (taken.logits, taken.caches), strict=True)
    assert (back.prompts, back.identity, back.seconds) == (taken.prompts, taken.identity, taken.seconds)
    some = lambda x: jnp.asarray(RNG.integers(0, 2, x.shape).astype(x.dtype))
    half = dataclasses.replace(taken, caches=jax.tree.map(some, model().init_caches(2, 64, "bfloat16")))
    half.save(folder.parent / "half")
    chex.assert_trees_all_equal(Snapshot.load(folder.parent / "half", model()).caches, half.caches, strict=True)


def test_refuses_another_model_or_text(taken, folder):
    longer = dummy_model(dataclasses.replace(model().config, norm_eps=1e-6))
    other = dummy_model(model().config, seed=1)
    message = r"of a model with another config \(norm_eps: 1e-05, not 1e-06\)"
    with pytest.raises(ValueError, match=message):
        Snapshot.load(folder, longer)
    with pytest.raises(ValueError, match=f"the snapshot is {message}"):
        taken.resume(longer)
    with pytest.raises(ValueError, match=r"one is of a model with other weights"):
        Snapshot.load(folder, other)
    with pytest.raises(ValueError, match="the snapshot is of a model with other weights"):
        taken.resume(other)
    text = [PROMPTS[0], [*PROMPTS[1][:7], 63, *PROMPTS[1][8:]]]
    with pytest.raises(ValueError, match=r"another text: prompts\[1\] has 9 tokens .* differ from token 7 on"):
        Snapshot.load(folder, model(), text)
    with pytest.raises(ValueError, match=r"prompts\[0\] has 70 tokens there and 69 here, .* from token 69 on"):
        Snapshot.load(folder, model(), [PROMPTS[0][:-1], PROMPTS[1]])
    with pytest.raises(ValueError, match="is of 2 prompts, expected 1"):
        Snapshot.load(folder, model(), PROMPTS[:1])


def test_refuses_what_is_damaged_or_no_snapshot(taken, tmp_path):
    with pytest.raises(ValueError, match="no arrays that certjax saved"):
        Snapshot.load(tmp_path, model())
    path = tmp_path / "one"
    taken.save(path)
    with pytest.raises(ValueError, match="already exists"):
        taken.save(path)
    manifest = path / "manifest.json"
    facts = json.loads(manifest.read_text())
    for change, message in (
        ({"format_version": 0}, "format 0, expected 1"),
        ({"seconds": None}, "not a whole snapshot"),
        ({"cache_dtype": "float16"}, "holds other arrays than expected: .*key"),
        ({"crc32": {}}, "damaged, missing or changed"),
    ):
        manifest.write_text(json.dumps(facts | change))
        with pytest.raises(ValueError, match=message):
            Snapshot.load(path, model())
    manifest.write_text(json.dumps(facts))
    data = max((file for file in (path / "arrays").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="damaged, missing or changed: "):
        Snapshot.load(path, model())


def test_name_follows_all_that_matters(monkeypatch):
    """Row 69 of pitfalls.md: what took long is kept, and found again."""
    one = model()
    name = lambda *, model=one, rows=((1, 2),), S=64, dtype="bfloat16": snapshot_name(model, rows, S, dtype)
    longer = dummy_model(dataclasses.replace(model().config, max_positions=64))
    names = [name(), name(model=longer), name(rows=[[1, 3]]), name(S=128), name(dtype="float32")]
    names.append(name(model=dummy_model(model().config, seed=1)))
    assert name(rows=[[np.int32(1), np.int32(2)]], model=model().with_attention("certified")) == names[0]
    monkeypatch.setattr(snapshot, "FORMAT_VERSION", 2)
    assert len({*names, name()}) == 7
