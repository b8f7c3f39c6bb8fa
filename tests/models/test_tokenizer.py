"""Tokenizer: one begin-of-text, faithful round trips, streams that never cut a character."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from certjax.models.gguf import read_gguf
from certjax.models.tokenizer import Tokenizer

TEXT = "hello wor1234 é 漢字 🎉"


@pytest.fixture(scope="module")
def make(write_gguf):
    def build(pre="smollm", **config):
        source = read_gguf(write_gguf("llama", metadata={"tokenizer.ggml.pre": pre}).path)
        return Tokenizer(source.tokenizer, source.tokenizer_config | config)

    return build


@pytest.fixture(scope="module")
def plain(make):
    return make()


def pieces(tokenizer, text):
    return [tokenizer.decode([i], skip_special=False) for i in tokenizer.encode(text, add_bos=False)]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        # Digits one by one; merged as the merge list has them; by threes (12 3 is a merge, 4 stays); one by one.
        ("smollm", ["hello", " wor", "1", "2", "3", "4"]),
        ("gpt-2", ["hello", " wor", "123", "4"]),
        ("llama-bpe", ["hello", " wor", "123", "4"]),
        ("qwen2", ["hello", " wor", "1", "2", "3", "4"]),
    ],
)
def test_pre_tokenizers(make, pre, expected):
    assert pieces(make(pre), "hello wor1234") == expected


def test_llama3_takes_whole_words_and_threes(make):
    assert pieces(make("llama-bpe"), "1212") == ["12", "1", "2"]  # 121 | 2
    assert pieces(make("gpt-2"), "1212") == ["12", "12"]
    assert pieces(make("llama-bpe"), "zq") == ["zq"]  # no merge makes it
    assert pieces(make("gpt-2"), "zq") == ["z", "q"]


def test_qwen_composes_characters(make):
    assert make("qwen2").encode("e\N{COMBINING ACUTE ACCENT}") == make("qwen2").encode("é")
    assert make("smollm").encode("e\N{COMBINING ACUTE ACCENT}") != make("smollm").encode("é")


def test_begin_of_text_once_and_only_where_wanted(make):
    without, wanting = make("smollm"), make("llama-bpe")
    assert without.encode("hello") == without.encode("hello", add_bos=False)
    assert wanting.encode("hello") == [0, *wanting.encode("hello", add_bos=False)]
    assert wanting.encode("<|begin|>hello") == wanting.encode("hello")
    assert wanting.encode("") == [0]
    assert make("smollm", add_bos_token=True).encode("hello")[0] == 0


def test_post_processor_does_not_add_a_second_one(make):
    content = json.loads(make("llama-bpe")._tokenizer.to_str())
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [0], "tokens": ["<|begin|>"]}},
    }
    config = {"bos_token_id": 0, "eos_token_id": [1], "add_bos_token": True, "chat_template": None}
    assert Tokenizer(content, config).encode("hello") == make("llama-bpe").encode("hello")


def test_special_tokens(plain):
    ids = plain.encode("hello<|end|>")
    assert ids[-1] in plain.eos_ids
    assert plain.decode(ids) == "hello"
    assert plain.decode(ids, skip_special=False) == "hello<|end|>"
    assert (plain.eos_ids, plain.bos_id, plain.vocab_size) == ({1, 2}, 0, 288)


def test_errors(make):
    with pytest.raises(ValueError, match=r"expected a bos_token_id, got None"):
        make(bos_token_id=None, add_bos_token=True)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer({"version": "1.0"}, {})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, r"tokenizer_config: bos_token_id must be a token id or null, got nothing"),
        ({"bos_token_id": "<s>"}, r"bos_token_id must be a token id or null, got '<s>'"),
        ({"bos_token_id": 0}, r"eos_token_id must be a list of token ids, got nothing"),
        ({"bos_token_id": 0, "eos_token_id": None}, r"eos_token_id must be a list of token ids, got None"),
        ({"bos_token_id": 0, "eos_token_id": [True]}, r"eos_token_id must be a list of token ids, got \[True\]"),
        ({"bos_token_id": 0, "eos_token_id": [1], "add_bos_token": 1}, r"add_bos_token must be true or false, got 1"),
    ],
)
def test_wrong_config(plain, config, message):
    with pytest.raises(ValueError, match=message):
        Tokenizer(json.loads(plain._tokenizer.to_str()), config)


@given(text=st.text() | st.text("é漢🎉 a1") | st.just(TEXT))
def test_round_trip_and_stream(plain, text):
    ids = plain.encode(text)
    assert plain.decode(ids, skip_special=False) == text
    stream = plain.stream(skip_special=False)
    parts = [stream.push(i) for i in ids]
    assert "".join(parts) + stream.flush() == text
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in part for part in parts)


@given(ids=st.lists(st.integers(0, 287), max_size=30))
def test_stream_of_any_tokens_says_what_decode_says(plain, ids):
    for skip in (True, False):
        stream = plain.stream(skip_special=skip)
        said = "".join([*(stream.push(i) for i in ids), stream.flush()])
        assert said == plain.decode(ids, skip_special=skip)


def test_stream_is_prompt_and_can_be_reused(plain):
    ids = plain.encode("a漢b")
    stream = plain.stream()
    assert [stream.push(i) for i in ids] == ["a", "", "", "漢", "b"]
    stream.push(ids[1])
    assert stream.flush() == "\N{REPLACEMENT CHARACTER}"
    assert stream.push(ids[0]) == "a"
    assert stream.flush() == ""
