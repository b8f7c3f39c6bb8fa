"""`certjax demo`: the context and its scaling, prefills that are kept, the table."""

import dataclasses
from unittest import mock

import chex
import jax.numpy as jnp
import pytest

from certjax.eval import demo, demo_table
from certjax.models.dummy import dummy_config, dummy_model
from certjax.models.llama import GenerateResult, RopeConfig, Snapshot
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


def test_a_document_is_read_once(tmp_path, monkeypatch, capsys):
    model, read = dummy_model(dummy_config(num_layers=1, max_positions=64)), []
    take = Snapshot.take
    monkeypatch.setattr(
        Snapshot, "take", lambda model, rows, **options: read.append(rows) or take(model, rows, **options)
    )
    get = lambda ids: demo.prefilled(model, ids, 64, str(tmp_path / "kept" / "here"))
    first, from_folder = get([1, 2])
    assert not from_folder
    again, from_folder = get([1, 2])
    assert from_folder
    assert again.seconds == first.seconds
    chex.assert_trees_all_equal((again.logits, again.caches), (first.logits, first.caches), strict=True)
    assert not get([1, 3])[1]
    assert read == [[[1, 2]], [[1, 3]]]
    monkeypatch.setattr(Snapshot, "save", mock.Mock(side_effect=ValueError("no room")))
    assert not get([1, 4])[1]
    assert "not kept: no room" in capsys.readouterr().err


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

    monkeypatch.setattr(Snapshot, "take", None)
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


def test_delta_is_spent_on_exact_heads_too():
    """Which heads come out exact depends on the draw: leaving them out would choose the calls after it."""
    shape = (5, 2, 1, 4)
    zeros = jnp.zeros(shape)
    exact = jnp.arange(40).reshape(shape) % 2 == 0
    counts = {"certified": zeros == 0, "exact": exact, "keys_read": zeros, "bytes_read": zeros}
    tokens, lengths = jnp.zeros((1, 6), jnp.int32), jnp.full((1,), 6)
    result = GenerateResult(tokens, lengths, counts | {"error_over_epsilon": zeros})
    assert demo_table.summary(result, result, result, 1e-3)["delta_spent"] == pytest.approx(40e-3)
