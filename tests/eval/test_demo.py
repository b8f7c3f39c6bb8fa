"""`certjax demo`: the context and its scaling, prefills kept in files, the table."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from certjax.eval import demo, demo_table, prefill_file
from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import GenerateResult, RopeConfig
from tests.eval.conftest import TRAINED


class TestContext:
    def test_scales_positions_by_what_is_missing(self):
        config = dummy_config(max_positions=100, rope=RopeConfig(theta=5e4, angles="exact"))
        assert demo.stretched(config, 100) is config
        longer = demo.stretched(config, 250)
        assert longer.max_positions == 250
        assert longer.rope == RopeConfig(
            theta=5e4, rope_type="yarn", factor=2.5, original_max_positions=100, angles="exact"
        )
        assert dataclasses.replace(longer, max_positions=100, rope=config.rope) == config

    def test_tells_embeddings_that_depend_on_it_the_context(self):
        dynamic = RopeConfig(rope_type="dynamic", factor=2.0, original_max_positions=100, context=100)
        for context in (50, 250):
            config = demo.stretched(dummy_config(max_positions=100, rope=dynamic), context)
            assert (config.max_positions, config.rope.context) == (context, context)
        factors = {"short_factor": (1.0,) * 8, "long_factor": (2.0,) * 8}
        rope = RopeConfig(rope_type="longrope", factor=4.0, original_max_positions=25, context=100, **factors)
        config = dummy_config(max_positions=100, rope=rope)
        assert demo.stretched(config, 25).rope.context == 25  # so the short factors serve
        with pytest.raises(ValueError, match=r"101 tokens exceeds the model's 100, .*\(longrope\)"):
            demo.stretched(config, 101)

    def test_refuses_to_scale_twice(self):
        config = dummy_config(max_positions=100, rope=RopeConfig(rope_type="linear", factor=2.0))
        assert demo.stretched(config, 100) is config
        with pytest.raises(ValueError, match=r"101 tokens exceeds the model's 100, .*\(linear\); use --context 100"):
            demo.stretched(config, 101)

    def test_text_that_is_too_short(self, checkpoint, text):
        message = r"text has 120 tokens: a context of 200 with 48 generated needs 152; .* --context 168$"
        with pytest.raises(ValueError, match=message):
            demo.run(checkpoint, prompt_file=text, context=200)

    def test_no_room_to_read(self, checkpoint, text):
        for context, tokens, got in ((48, 48, 48), (None, TRAINED, TRAINED)):
            with pytest.raises(ValueError, match=f"context must exceed the {tokens} tokens to generate: got {got}"):
                demo.run(checkpoint, prompt_file=text, context=context, new_tokens=tokens)

    def test_folder_that_cannot_be_made(self, checkpoint, text):
        with pytest.raises(ValueError, match=r"text: cannot be made: .*; give another folder"):
            demo.run(checkpoint, prompt_file=text, prefill_dir=text)


def test_a_document_is_read_once(kept, tmp_path, monkeypatch):
    model, result = kept
    read = []

    def prefill(model, prompts, caches, *, progress):
        assert caches[0].capacity == 64
        read.append(prompts)
        return result.logits, result.caches

    monkeypatch.setattr(demo, "prefill", prefill)
    (tmp_path / "manifest.json").write_text("{}")
    get = lambda ids: demo.prefilled(model, ids, 64, str(tmp_path), str(tmp_path / "kept" / "here"))
    first, from_file = get([1, 2])
    assert not from_file
    again, from_file = get([1, 2])
    assert from_file
    assert again.seconds == first.seconds
    chex.assert_trees_all_equal((again.logits, again.caches), (first.logits, first.caches), strict=True)
    assert not get([1, 3])[1]
    assert read == [[[1, 2]], [[1, 3]]]


@pytest.mark.slow
def test_reads_once_and_scales_beyond_the_trained_positions(checkpoint, text, tmp_path, capsys, monkeypatch):
    options = {"prompt_file": text, "new_tokens": 4, "replay_steps": 2, "seed": 2**32 - 1}
    options["prefill_dir"] = str(tmp_path / "kept" / "here")
    first = demo.run(checkpoint, context=120, **options)
    out, err = capsys.readouterr()
    assert "116 tokens, then 4 generated; positions scaled: YaRN, 1.25 × the trained 96\n" in out
    assert "prefill …" in err
    assert (first["context"], first["pool"], first["prefill_kept"]) == (116, 54, False)  # from 117 − 64 to 119 − 64
    assert f"of a pool of {first['pool']}\n" in out
    assert first["timed_steps"] == 2 * demo.ROUNDS
    ratio = first["certified_tokens_per_s"] / first["dense_tokens_per_s"]
    line = next(line for line in out.splitlines() if "decode, tokens/s" in line)
    assert line.endswith(f"{ratio:.2f}")

    monkeypatch.setattr(demo, "prefill", None)
    again = demo.run(checkpoint, context=120, **options)
    out, err = capsys.readouterr()
    assert "now read from it" in out
    assert "prefill" not in err
    timed = {f"{who}_{what}" for who in ("certified", "dense") for what in ("tokens_per_s", "cpu_ms")}
    assert all(first[name] > 0 for name in timed)
    changes = {"prefill_kept", *timed}
    assert {k: v for k, v in first.items() if k not in changes} == {k: v for k, v in again.items() if k not in changes}
    with pytest.raises(TypeError):  # another context is another document: there is nothing to read
        demo.run(checkpoint, context=119, **options)
    capsys.readouterr()


@pytest.fixture(scope="module")
def kept():
    """A model and what a prefill might have left in caches of 64 tokens."""
    rng = np.random.default_rng(0)
    model = dummy_model(dummy_config(max_positions=64))
    some = lambda x: jnp.asarray(rng.integers(0, 2, x.shape).astype(x.dtype))
    caches = jax.tree.map(some, model.init_caches(1, 64, "bfloat16"))
    return model, prefill_file.Prefill(some(jnp.zeros((1, 64))), caches, 1.5)


class TestPrefillFile:
    def test_gives_back_every_bit(self, kept, tmp_path, capsys):
        model, result = kept
        path = tmp_path / "a.npz"
        assert prefill_file.read(path, model, 64, "bfloat16") is None
        prefill_file.write(path, result)
        back = prefill_file.read(path, model, 64, "bfloat16")
        assert back.seconds == 1.5
        chex.assert_trees_all_equal((back.logits, back.caches), (result.logits, result.caches), strict=True)
        assert list(tmp_path.iterdir()) == [path]
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other", "missing", "shape", "dtype"])
    def test_what_cannot_be_used_goes(self, kept, damage, tmp_path, capsys):
        model, result = kept
        path = tmp_path / "a.npz"
        prefill_file.write(path, result)
        content = bytearray(path.read_bytes())
        match damage:
            case "empty":
                path.write_bytes(b"")
            case "cut":
                path.write_bytes(content[: len(content) // 2])
            case "flipped":
                content[len(content) // 2] ^= 1
                path.write_bytes(content)
            case "other":
                with path.open("wb") as file:
                    np.save(file, np.zeros(3))
            case _:
                with np.load(path) as file:
                    arrays = dict(file)
                x = arrays.pop("1.value_size")
                if damage != "missing":
                    arrays["1.value_size"] = x[..., :-1] if damage == "shape" else x.astype(np.float32)
                with path.open("wb") as file:
                    np.savez(file, **arrays)
        assert prefill_file.read(path, model, 64, "bfloat16") is None
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"{path}: cannot be used, made again: ")
        assert not path.exists()

    def test_name_follows_all_that_matters(self, kept, tmp_path):
        model, _ = kept
        manifest = tmp_path / "manifest.json"
        manifest.write_text("{}")
        name = lambda *, model=model, ids=(1, 2), S=64, dtype="bfloat16": prefill_file.file_name(
            tmp_path, model, ids, S, dtype
        )
        longer = dummy_model(demo.stretched(model.config, 128))
        names = [name(), name(model=longer), name(ids=(1, 3)), name(S=128), name(dtype="float32")]
        manifest.write_text('{"fingerprint": "other"}')
        names.append(name())
        assert len(set(names)) == len(names)
        manifest.write_text("{}")
        assert name(ids=[np.int32(1), np.int32(2)]) == names[0]

    def test_a_folder_that_is_gone_is_no_error(self, kept, tmp_path, capsys):
        path = tmp_path / "gone" / "a.npz"
        prefill_file.write(path, kept[1])
        assert capsys.readouterr().err.startswith(f"{path}: not kept: ")


def test_delta_is_spent_on_exact_heads_too():
    """Which heads come out exact depends on the draw: leaving them out would choose the calls after it."""
    shape = (5, 2, 1, 4)
    zeros = jnp.zeros(shape)
    exact = jnp.arange(40).reshape(shape) % 2 == 0
    counts = {"certified": zeros == 0, "exact": exact, "keys_read": zeros, "bytes_read": zeros}
    tokens, lengths = jnp.zeros((1, 6), jnp.int32), jnp.full((1,), 6)
    result = GenerateResult(tokens, lengths, counts | {"error_over_epsilon": zeros})
    assert demo_table.summary(result, result, result, 1e-3)["delta_spent"] == pytest.approx(40e-3)
