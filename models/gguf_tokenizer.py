"""GGUF metadata → the content of a ``tokenizer.json``: byte-level BPE with the pre-tokenizers whose rules we know.

Source of the rules: the published ``tokenizer.json`` files of GPT-2, SmolLM2, Llama 3 and Qwen 2.
"""

import functools
import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from certjax.models.gguf_metadata import Metadata

_CONTROL, _USER_DEFINED = 3, 4
# Contractions, words, numbers (of how many digits?), punctuation, line ends, spaces.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_from_gguf(
    metadata: Metadata, vocab_size: int
) -> tuple[dict[str, Any] | None, dict[str, Any], tuple[str, ...]]:
    """Rebuilds the tokenizer.

    Returns:
      (content of ``tokenizer.json`` or None, tokenizer config as in `Source`, messages that say why it is None).

    Raises:
      ValueError: token lists or ids that contradict each other.
    """
    values = metadata.values
    pre = values.get("tokenizer.ggml.pre")
    ends = [_token_id(metadata, f"{name}_token_id", vocab_size) for name in ("eos", "eot", "eom")]
    template = values.get("tokenizer.chat_template")
    tokens, eos = values.get("tokenizer.ggml.tokens"), ends[0]
    config = {
        "bos_token_id": _token_id(metadata, "bos_token_id", vocab_size),
        "eos_token": tokens[eos] if eos is not None and isinstance(tokens, list) and eos < len(tokens) else None,
        "eos_token_id": sorted({end for end in ends if end is not None}),
        "add_bos_token": values.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe") is True,
        "chat_template": template if isinstance(template, str) else None,
    }
    kind = values.get("tokenizer.ggml.model")
    if kind != "gpt2":
        return None, config, (f"no tokenizer: tokenizer.ggml.model is {kind!r}, supported is 'gpt2' (byte-level BPE)",)
    steps = _splitters()
    if not isinstance(pre, str) or pre not in steps:
        return None, config, (f"no tokenizer: pre-tokenizer {pre!r} is not supported, only {', '.join(steps)}",)
    return json.loads(_build(metadata, steps[pre], pre, vocab_size).to_str()), config, ()


@functools.cache
def _splitters() -> dict[str, list[pre_tokenizers.PreTokenizer]]:
    own_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return {
        "gpt-2": [own_words],
        "smollm": [pre_tokenizers.Digits(individual_digits=True), own_words],
        "llama-bpe": [pre_tokenizers.Split(Regex(_WORDS % "{1,3}"), "isolated"), bytes_only],
        "qwen2": [pre_tokenizers.Split(Regex(_WORDS % ""), "isolated"), bytes_only],
    }


def _build(metadata: Metadata, steps: list[pre_tokenizers.PreTokenizer], pre: str, vocab_size: int) -> Tokenizer:
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    kinds = _list(metadata, "tokenizer.ggml.token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "tokenizer.ggml.merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens) or len(tokens) > vocab_size:
        raise metadata.fail("tokenizer.ggml.tokens", f"at most {vocab_size} different tokens")
    if len(kinds) != len(tokens):
        raise metadata.fail("tokenizer.ggml.token_type", f"{len(tokens)} numbers, one for each token")
    bad = next((m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocabulary.keys()), None)
    if bad:
        raise ValueError(f"{metadata.path}: tokenizer.ggml.merges: expected two tokens that make a third, got {bad}")
    # A word that is a token is one token, whatever the merges say: Llama 3 alone.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED]
    )
    return tokenizer


def _list(metadata: Metadata, key: str, kind: type) -> list[Any]:
    value = metadata.values.get(key)
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise metadata.fail(key, f"a list of {kind.__name__}")
    return value


def _token_id(metadata: Metadata, name: str, vocab_size: int) -> int | None:
    key = f"tokenizer.ggml.{name}"
    value = metadata.values.get(key)
    if value is not None and (not isinstance(value, int) or not 0 <= value < vocab_size):
        raise metadata.fail(key, f"a token id below {vocab_size}")
    return value
