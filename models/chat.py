"""Chat templates: a conversation → the text that a model was trained to continue.

The environment is the one that templates are written for: jinja2, sandboxed, with blocks trimmed, loop controls, the
`generation` block (which marks what the model says and prints what it holds), and the names `raise_exception`,
`strftime_now` and `tojson`. A template comes with a downloaded model: it is a program of somebody else's, and can
reach nothing but what it is given.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = ("system", "developer", "user", "assistant", "tool")


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Renders a template.

    Args:
      template: Jinja source.
      messages: mappings with a `role` (one of `ROLES`) and a `content`, a string; what else they hold is the
        template's to read.
      variables: what else the template sees.

    Raises:
      ValueError: no message, one that is not of that form, or a template that is wrong or refuses the conversation.
    """
    _check(messages)
    try:
        return _environment().from_string(template).render(messages=list(messages), **variables)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"chat template, line {error.lineno}: {error.message}") from None
    except _Refusal as error:
        raise ValueError(f"the chat template refuses the conversation: {error}") from None
    except Exception as error:  # the template's own mistakes are of every kind
        raise ValueError(f"the chat template fails on the conversation: {type(error).__name__}: {error}") from error


def undefined(name: str, why: str) -> jinja2.Undefined:
    """A variable that a template may ask about, but not print."""
    return jinja2.StrictUndefined(f"{name} is not known: {why}", name=name)


class _Refusal(Exception):  # noqa: N818
    """What `raise_exception` raises."""


class _GenerationBlock(Extension):
    """Reads {% generation %} … {% endgeneration %} as what stands between."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    return environment


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, Mapping)) or not messages:
        raise ValueError(f"messages must be a list of at least one message, got {messages!r}")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ValueError(f"messages[{i}] must be a mapping with role and content, got {message!r}")
        if message.get("role") not in ROLES:
            raise ValueError(f"messages[{i}].role must be one of {', '.join(ROLES)}, got {message.get('role')!r}")
        if not isinstance(message.get("content"), str):
            raise ValueError(f"messages[{i}].content must be a string, got {message.get('content')!r}")
