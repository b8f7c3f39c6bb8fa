"""Running text that hides needles: a user's, or the language reference that every CPython carries."""

import dataclasses
import functools
import json
import platform
import re

from certjax.eval import demo
from certjax.eval.tasks.ruler.templates import digest, read_bytes

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity
class Essay:
    """A text whose first words fill a prompt.

    Attributes:
      words: split at white space.
      name: what results call it.
      sha256: 16 hexadecimal digits of the text.
    """

    words: tuple[str, ...]
    name: str
    sha256: str

    @functools.lru_cache(4)  # noqa: B019 - one or two essays a process; sizes are asked for again and again
    def sentences(self, count: int) -> tuple[str, ...]:
        """The first `count` words, from the start again where the text ends, split after ".", "!" and "?"."""
        whole, rest = divmod(count, len(self.words))
        return tuple(_SENTENCE_END.split(" ".join([*self.words * whole, *self.words[:rest]])))


def load(path: str | None) -> Essay:
    """An essay.

    Args:
      path: UTF-8 text, or JSON with the text in `text` (the published form of Paul Graham's essays); None for the
        language reference. The published task splits sentences with a trained model (punkt) instead.

    Raises:
      ValueError: a file that cannot be read, is not UTF-8 or holds no text.
    """
    if path is None:
        text, name = demo.read_text(None)[0], f"pydoc_data.topics of Python {platform.python_version()}"
    else:
        name, content = path, read_bytes(path)
        try:
            text = content.decode()
            if path.endswith(".json"):
                table = json.loads(text)
                text = table.get("text") if isinstance(table, dict) else None
        except ValueError as error:
            raise ValueError(f"{path}: is not UTF-8 text or JSON: {error}") from None
        if not isinstance(text, str):
            raise ValueError(f'{path}: must hold an object with a string "text"')
    words = tuple(text.split())
    if not words:
        raise ValueError(f"{name}: holds no text")
    return Essay(words, name, digest(text.encode()))
