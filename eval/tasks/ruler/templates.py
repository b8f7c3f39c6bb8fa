"""The wording of the tasks: ours, and how a file replaces any part of it."""

import hashlib
import json
import string
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Templates = Mapping[str, Mapping[str, str]]

# What may stand in braces; the fields in capitals below must.
_NEEDLE, _ASKED, _TEXT = {"kind", "key", "value"}, {"kind", "query"}, {"kind", "context", "query"}
_FIELDS: dict[str, dict[str, tuple[set[str], set[str]]]] = {
    "haystack": {"noise": (set(), set())},
    "niah": {
        "needle": (_NEEDLE, {"key", "value"}),
        **{f"context_{number}": (_TEXT, {"context"}) for number in ("one", "many")},
        **{f"question_{number}": (_ASKED, {"query"}) for number in ("one", "many")},
        **{f"prefix_{number}": (_ASKED, set()) for number in ("one", "many")},
    },
    "vt": {
        "first": ({"name", "value"}, {"name", "value"}),
        "next": ({"name", "previous"}, {"name", "previous"}),
        "context": ({"context", "query", "count"}, {"context"}),
        "question": ({"query", "count"}, {"query"}),
        "prefix": ({"query", "count"}, set()),
    },
    "cwe": {"context": ({"context"}, {"context"}), "question": (set(), set()), "prefix": (set(), set())},
    "fwe": {"context": ({"context"}, {"context"}), "question": (set(), set()), "prefix": (set(), set())},
    "qa": {
        "document": ({"number", "text"}, {"text"}),
        "context": ({"context", "query"}, {"context"}),
        "question": ({"query"}, {"query"}),
        "prefix": ({"query"}, set()),
    },
}  # field sets: allowed, required

DEFAULTS: dict[str, dict[str, str]] = {
    "haystack": {
        "noise": "The hill is green. The lake is still. The wind is soft. Off we set. Home we come.",
    },
    "niah": {
        "needle": "Among the secret {kind}, the one that belongs to {key} is: {value}.",
        "context_one": "A secret {kind} lies hidden in the text below. Keep it in mind: you will be asked for it.\n"
        "{context}\n",
        "context_many": "Some secret {kind} lie hidden in the text below. Keep them in mind: you will be asked for "
        "them.\n{context}\n",
        "question_one": "According to the text above, which secret {kind} belongs to {query}?",
        "question_many": "According to the text above, which secret {kind} belong to {query}? Name all of them.",
        "prefix_one": " According to the text above, the secret {kind} that belongs to {query} is",
        "prefix_many": " According to the text above, the secret {kind} that belong to {query} are",
    },
    "vt": {
        "first": "VAR {name} = {value}",
        "next": "VAR {name} = VAR {previous} ",
        "context": "The text below hides assignments to variables. Follow them and keep track of which variables end "
        "up with the same value.\n\n{context}\n",
        "question": "Question: which variables in the text above have the value {query}? Name all of them.",
        "prefix": " Answer: by the assignments in the text above, the value {query} belongs to {count} variables, "
        "namely:",
    },
    "cwe": {
        "context": "Here is a numbered list of words. A few of them come up far more often than the others: remember "
        "those.\n{context}\n",
        "question": "Question: which ten words come up most often in the list?",
        "prefix": " Answer: the ten words that come up most often in the list are:",
    },
    "fwe": {
        "context": "The text below is in code. Count how often each coded word comes up and remember the most frequent "
        "ones. The dots '...' mean nothing.\n{context}\n",
        "question": "Question: the dots '...' aside, which three coded words come up most often in the text above?",
        "prefix": " Answer: the three coded words that come up most often in the text above are:",
    },
    "qa": {
        "document": "Document {number}:\n{text}",
        "context": "Find the answer to a question in these documents. Reply with the answer alone.\n\n{context}\n\n",
        "question": "Find the answer to the question in the documents above. Reply with the answer alone.\n\n"
        "Question: {query}",
        "prefix": " Answer:",
    },
}

CHAT: dict[str, dict[str, str]] = {
    "chatml": {"before": "<|im_start|>user\n", "after": "<|im_end|>\n<|im_start|>assistant\n"},
    "llama3": {
        "before": "<|start_header_id|>user<|end_header_id|>\n\n",
        "after": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    },
}  # without begin-of-text: the tokenizer adds it where the model wants one


def load(path: str | None) -> tuple[dict[str, dict[str, str]], dict[str, dict[str, str]]]:
    """The wording and the chat formats, with what a file replaces of them.

    Args:
      path: a JSON or TOML file with some of the tables and strings of `DEFAULTS`, and tables `chat.NAME` with the
        strings `before` and `after` that go round the user's turn; None for ours. A prompt is the `context` string,
        then `question`, then (after the assistant's header) `prefix`; where a task has them, forms `_one` and `_many`
        for one asked value and for several. Text before the question belongs into `context`: it is what a model reads
        before it knows the question (setup B).

    Raises:
      ValueError: a file that cannot be read, a table or string that is not known, or a field in braces that a string
        may not or must have.
    """
    tables = {name: dict(table) for name, table in DEFAULTS.items()}
    chat = {name: dict(table) for name, table in CHAT.items()}
    if path is None:
        return tables, chat
    for table, strings in read_table(path).items():
        if not isinstance(strings, dict):
            raise ValueError(f"{path}: {table} must be a table of strings, got {type(strings).__name__}")
        if table == "chat":
            for name, form in strings.items():
                if not isinstance(form, dict) or form.keys() != {"before", "after"}:
                    raise ValueError(f"{path}: chat.{name} must hold the strings before and after, got {form!r}")
                chat[name] = {key: _text(path, f"chat.{name}.{key}", text) for key, text in form.items()}
            continue
        if table not in tables:
            raise ValueError(f"{path}: unknown table {table!r}, expected some of {', '.join([*tables, 'chat'])}")
        for name, text in strings.items():
            if name not in tables[table]:
                raise ValueError(f"{path}: unknown string {table}.{name}, expected some of {', '.join(tables[table])}")
            _check_fields(path, f"{table}.{name}", _text(path, f"{table}.{name}", text), *_FIELDS[table][name])
            tables[table][name] = text
    return tables, chat


def read_table(path: str) -> dict[str, Any]:
    """The object in a JSON file, or the tables of a file whose name ends in .toml.

    Raises:
      ValueError: it cannot be read or is no object.
    """
    content = read_bytes(path)
    try:
        value = tomllib.loads(content.decode()) if Path(path).suffix == ".toml" else json.loads(content)
    except ValueError as error:  # of either format, or of UTF-8
        raise ValueError(f"{path}: is not UTF-8 text of its format: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold an object, got {type(value).__name__}")
    return value


def read_bytes(path: str) -> bytes:
    """A file's content; ValueError where it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def digest(content: Any) -> str:
    """16 hexadecimal digits that differ where bytes, or a value that JSON can hold, differ."""
    if not isinstance(content, bytes):
        content = json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(content).hexdigest()[:16]


def _text(path: str, name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise ValueError(f"{path}: {name} must be a string, got {type(text).__name__}")
    return text


def _check_fields(path: str, name: str, text: str, allowed: set[str], required: set[str]) -> None:
    try:
        found = {field for _, field, _, _ in string.Formatter().parse(text) if field is not None}
    except ValueError as error:
        raise ValueError(f"{path}: {name}: {error}") from None
    if not found <= allowed or not required <= found:
        raise ValueError(
            f"{path}: {name} has the fields {sorted(found)}, expected {sorted(required)} and perhaps "
            f"{sorted(allowed - required)}; write other braces twice"
        )
