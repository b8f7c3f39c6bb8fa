"""`certjax generate`: prompts from everywhere, text and JSON, conversations."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from certjax.eval import cli
from certjax.eval.progress import Progress
from certjax.models import Tokenizer, checkpoints
from certjax.models.llama import LlamaConfig, decode, load_model, prefill

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content | trim }};{% endfor %}a:"
PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def chatty(checkpoint, tmp_path_factory):
    """The same model with a chat template."""
    path = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(checkpoint, path)
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": TEMPLATE}))
    return str(path)


def run(*words):
    with pytest.raises(SystemExit) as end:
        cli.main(["certjax", "generate", *words])
    return end.value.code


def said_by_the_library(checkpoint, text, count):
    loaded = checkpoints.load(checkpoint)
    tokenizer = Tokenizer(loaded.tokenizer, loaded.tokenizer_config)
    model = load_model(loaded.params, LlamaConfig.from_hf(loaded.config), attention="dense")
    read = prefill(model, [tokenizer.encode(text)], model.init_caches(1, 1024, "bfloat16"))
    return decode(model, *read, max_new_tokens=count, rng=jax.random.key(0))[0].tokens[0].tolist(), tokenizer


def test_file_pipe_and_text_say_the_same(checkpoint, tmp_path, capsys, monkeypatch):
    tokens, tokenizer = said_by_the_library(checkpoint, PROMPT, 8)
    file = tmp_path / "prompt"
    file.write_text(PROMPT)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(PROMPT.encode())))
    for source in (("--prompt", str(file)), ("--prompt", "-"), ("--text", PROMPT)):
        assert not run(checkpoint, *source, "--max-tokens", "8")
        out, err = capsys.readouterr()
        assert out == f"{tokenizer.decode(tokens)}\n"
        line = err.splitlines()[-1]  # on a slow machine there is progress before
        assert line.startswith("[8 tokens (length), ")
        assert "28 attention calls, 0 sampled and 28 exact; error ≤ 0.1 M with probability ≥ 1 − 0.01 for all" in line
    assert not run(checkpoint, "--text", PROMPT, "--max-tokens", "8", "--attention", "dense", "--json")
    dense = json.loads(capsys.readouterr().out)
    assert (dense["tokens"], dense["text"], dense["certificate"]) == (tokens, tokenizer.decode(tokens), None)


def test_json(checkpoint, capsys):
    sampled = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.9", "--json", "--max-tokens", "8")
    found = []
    for options in (("--seed", "1"), ("--seed", "1", "--delta-scope", "call"), ("--seed", "2")):
        assert not run(checkpoint, "--text", PROMPT, *sampled, *options)
        found.append(json.loads(capsys.readouterr().out))
    first, call, other = found
    assert first["tokens"] == call["tokens"] != other["tokens"]
    assert (first["finish_reason"], first["prompt_tokens"], len(first["tokens"])) == ("length", 17, 8)
    assert (call["certificate"]["delta_scope"], call["certificate"]["delta_per_call"]) == ("call", 0.01)
    assert first["certificate"]["calls"] == 28
    assert first["certificate"]["delta_per_call"] == pytest.approx(0.01 / 28)
    assert set(first["timings"]) == {"load_s", "prefill_s", "decode_s", "tokens_per_s"}
    loaded = checkpoints.load(checkpoint)
    assert first["text"] == Tokenizer(loaded.tokenizer, loaded.tokenizer_config).decode(first["tokens"])


def test_conversation(chatty, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello and good day\n\nAnd you?\n"))
    assert not run(chatty, "--chat", "--json", "--max-tokens", "8")
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    hello = "u:Hello and good day;a:"
    for answer, asked in ((first, hello), (second, f"{hello}{first['text'].strip()};u:And you?;a:")):
        assert not run(chatty, "--text", asked, "--json", "--max-tokens", "8")
        whole = json.loads(capsys.readouterr().out)
        assert (answer["text"], answer["prompt_tokens"]) == (whole["text"], whole["prompt_tokens"])
    assert first["prompt_tokens_read"] == first["prompt_tokens"] == 1 + len(hello)
    assert second["prompt_tokens_read"] < second["prompt_tokens"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n" + 10 * "And you?"))
    assert run(chatty, "--chat", "--context", "30") == 1
    assert "prompt of 11 tokens and 256 new ones exceed the context of 30" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--epsilon", "1"), "epsilon must lie in (0, 1): got 1.0"),
        (("--delta", "0"), "delta must lie in (0, 1): got 0.0"),
        (("--max-tokens", "0"), "max_new_tokens must be a positive integer, got 0"),
        (("--temperature", "-1"), "temperature must be 0 (greedy) or positive, got -1.0"),
        (("--top-k", "0"), "top_k must be a positive integer or None, got 0"),
        (("--top-p", "0"), "top_p must lie in (0, 1], got 0.0"),
        (("--seed", "-1"), "seed must lie in 0 … 4294967295: got -1"),
    ],
)
def test_numbers_are_checked_before_the_model_is_loaded(options, message, capsys):
    assert run("nowhere", "--text", "x", *options) == 1
    assert capsys.readouterr().err == f"certjax: {message}\n"


def test_mistakes(checkpoint, chatty, tmp_path, capsys, monkeypatch):
    (tmp_path / "none").mkdir()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff")))
    for words, message in (
        (("nowhere", "--text", "x"), "nowhere: not a certjax checkpoint"),
        ((checkpoint, "--prompt", "nothing"), "nothing: cannot be read"),
        ((checkpoint, "--prompt", "-"), "standard input: is not UTF-8 text"),
        ((checkpoint, "--chat"), "has no chat template; give a text"),
        ((checkpoint, "--text", 50 * "ab"), "context of 357 tokens exceeds the model's 96"),
        ((chatty, "--chat", "--context", "97"), "context of 97 tokens exceeds the model's 96"),
    ):
        assert run(*words) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    for words in ((checkpoint,), (checkpoint, "--chat", "--text", "x")):
        assert run(*words) == 2
        capsys.readouterr()


def test_help_has_examples(capsys):
    assert not run("--help")
    assert "certjax generate model/ --chat" in capsys.readouterr().out


def test_progress_of_what_takes_long(capsys):
    with Progress("quick", after=60) as progress:
        progress(1, 1)
    assert capsys.readouterr().err == ""
    with Progress("slow", "steps", after=0.01) as progress:
        progress._timer.join()
        progress(1, 1)
    assert capsys.readouterr().err.splitlines()[0] == "slow …"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["pipe", "interrupt"])
def test_ends_quietly(checkpoint, how):
    words = ["--text", PROMPT, "--max-tokens", "70"]
    script = Path(__file__).parents[2]  # another folder than the package's: the installed one is meant
    process = subprocess.Popen(
        [sys.executable, "-m", "certjax.eval.cli", "generate", checkpoint, *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=script / "tests",
    )  # fmt: skip
    assert process.stdout.read(1)
    if how == "pipe":
        process.stdout.close()
    else:
        process.send_signal(signal.SIGINT)
    code = process.wait(timeout=120)
    err = process.stderr.read().decode()
    process.stderr.close()
    process.stdout.close()
    assert "Traceback" not in err
    assert "Exception ignored" not in err
    assert code == (128 + signal.SIGPIPE if how == "pipe" else 130), (os.name, err)
