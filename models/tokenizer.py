"""Text ↔ token ids."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from certjax.models.chat import render_chat, undefined

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
      chat_template: source of the model's chat template, or None.
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
        self.chat_template: str | None = tokenizer_config.get("chat_template")
        self._eos_token: str | None = tokenizer_config.get("eos_token")
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

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """The ids of a conversation as the model was trained to read it.

        Special tokens written out in a message become those tokens, as in `encode`. One begin-of-text token stands in
        front where the template prints one or the model wants one.

        Args:
          messages: mappings with `role` ("system", "developer", "user", "assistant" or "tool") and `content`.
          add_generation_prompt: end with what begins an answer.
          variables: for the template, such as `tools` or `date_string`.

        Raises:
          ValueError: the model has no template, the template is wrong or refuses the conversation, or messages that
            are not of that form.
        """
        if self.chat_template is None:
            raise ValueError(
                "the model has no chat template: it is no chat model, or was converted without; use encode"
            )
        tokens = {"bos_token": self._token(self.bos_id), "eos_token": self._eos()}
        names = {name: token for name, token in tokens.items() if token is not None} | variables
        text = render_chat(self.chat_template, messages, add_generation_prompt=add_generation_prompt, **names)
        ids = self.encode(text)
        while self.bos_id is not None and ids[:2] == [self.bos_id] * 2:
            del ids[0]
        return ids

    def _token(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def _eos(self) -> Any:
        """The end token that a template may print: the one that the model's files name, or the only one."""
        if self._eos_token is not None:
            return self._eos_token
        if len(self.eos_ids) == 1:
            return self._token(next(iter(self.eos_ids)))
        return undefined(
            "eos_token", f"the model has {len(self.eos_ids)} end tokens and its files name none of them so"
        )

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
    for name in ("chat_template", "eos_token"):
        if name in config:
            fields[name] = (lambda x: x is None or isinstance(x, str), "a string or null")
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
