"""Text ↔ token ids."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import tokenizers

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Tokenizer:
    """A tokenizer with what a model wants around it: the first token and the tokens that end a text.

    Args:
      tokenizer: the content of a ``tokenizer.json``.
      tokenizer_config: as in `certjax.models.Source`.

    Attributes:
      bos_id: id of the begin-of-text token, or None.
      add_bos: whether the model wants it.
      eos_ids: ids that end a text.
      vocab_size: number of tokens, added ones included. A model's embedding may have more rows.

    Raises:
      ValueError: the content is not a tokenizer, a field of `tokenizer_config` is missing or of the wrong type, or a
        begin-of-text token is wanted and not named.
    """

    def __init__(self, tokenizer: dict[str, Any], tokenizer_config: dict[str, Any]):
        self._tokenizer = build_tokenizer(tokenizer)
        _check_config(tokenizer_config)
        self.bos_id: int | None = tokenizer_config["bos_token_id"]
        self.add_bos: bool = tokenizer_config["add_bos_token"]
        self.eos_ids: frozenset[int] = frozenset(tokenizer_config["eos_token_id"])
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if self.add_bos and self.bos_id is None:
            raise ValueError("tokenizer_config: add_bos_token is true, expected a bos_token_id, got None")

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Encodes a text.

        Args:
          text: special tokens written out in it become those tokens.
          add_bos: begin with the begin-of-text token, where the model wants one and the text has none yet.
        """
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decodes ids; bytes that are not UTF-8 become U+FFFD, special tokens vanish unless kept."""
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def stream(self, *, skip_special: bool = True) -> "TextStream":
        """Returns a decoder that is fed one token at a time."""
        return TextStream(self, skip_special)


class TextStream:
    """Turns tokens into text as they come, never in the middle of a character.

    All that `push` and `flush` return, joined, is what `Tokenizer.decode` returns for all ids at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool):
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []  # from the last piece of text on: what follows may depend on it
        self._told = 0  # how many of them are in text already returned

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is now certain, often "" inside a multi-byte character."""
        self._ids.append(int(token))
        text = self._pending()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        del self._ids[: self._told]
        self._told = len(self._ids)
        return text

    def flush(self) -> str:
        """Ends the stream and returns what was held back; a cut-off character becomes U+FFFD."""
        text = self._pending()
        self._ids, self._told = [], 0
        return text

    def _pending(self) -> str:
        told = self._tokenizer.decode(self._ids[: self._told], skip_special=self._skip_special)
        return self._tokenizer.decode(self._ids, skip_special=self._skip_special)[len(told) :]


def _check_config(config: dict[str, Any]) -> None:
    is_id = lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 0
    fields: dict[str, tuple[Callable[[Any], bool], str]] = {
        "bos_token_id": (lambda x: x is None or is_id(x), "a token id or null"),
        "eos_token_id": (lambda x: isinstance(x, list) and all(map(is_id, x)), "a list of token ids"),
        "add_bos_token": (lambda x: isinstance(x, bool), "true or false"),
    }
    for name, (fits, expected) in fields.items():
        if name not in config or not fits(config[name]):
            got = repr(config[name]) if name in config else "nothing"
            raise ValueError(f"tokenizer_config: {name} must be {expected}, got {got}")


def build_tokenizer(content: dict[str, Any], name: str = "tokenizer.json") -> tokenizers.Tokenizer:
    """Builds a tokenizer from the content of a ``tokenizer.json``.

    Raises:
      ValueError: the content is not a tokenizer; `name` says which.
    """
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the tokenizers package raises bare Exception
        raise ValueError(f"{name}: not a tokenizer: {error}") from None
