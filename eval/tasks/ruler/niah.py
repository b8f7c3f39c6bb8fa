"""Needles in a haystack: values of keys, hidden in noise, in an essay or among other needles."""

import dataclasses
import uuid
from collections.abc import Container
from typing import Literal

from certjax.eval.tasks.ruler.parts import Draft, Draws, Setting
from certjax.eval.tasks.ruler.sizing import DoesNotFitError

Kind = Literal["words", "numbers", "uuids"]
_DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent


@dataclasses.dataclass(frozen=True)
class Needles:
    """A variant.

    Attributes:
      haystack: what hides the needles.
      key: kind of the keys.
      value: kind of the values.
      keys: how many keys have values.
      values: how many values a key has.
      queries: how many keys are asked for.
    """

    haystack: Literal["noise", "essay", "needle"]
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1


class Builder:
    """See `parts.Builder`."""

    ceiling = None

    def __init__(self, needles: Needles, setting: Setting):
        self._needles, self._setting = needles, setting
        self._keys = max(needles.keys, needles.queries)
        count = self._keys * needles.values
        pairs = len(setting.materials.words.pairs)
        if needles.key == "words" and pairs <= self._keys:
            raise DoesNotFitError(
                f"needs more than {self._keys} pairs of adjective and noun, the word lists make {pairs}"
            )
        if needles.haystack == "essay":
            self.unit, self.floor, self.step = "words", 50, 500
        else:
            self.unit = "lines" if needles.haystack == "noise" else "needles"
            self.floor, self.step = max(count, 5), 25 if setting.length >= 4096 else 5

    def build(self, size: int, draws: Draws, index: int) -> Draft:
        """A sample; `size` counts words of the essay, or lines."""
        del index
        n, fresh = self._needles, self._setting.fresh
        wording = self._setting.materials.templates["niah"]
        plural = n.queries * n.values > 1
        kind = n.value if plural else n.value[:-1]
        keys: list[str] = []
        for _ in range(self._keys):
            keys.append(self._draw(n.key, draws, keys if fresh else ()))
        values = [[self._draw(n.value, draws, ()) for _ in range(n.values)] for _ in keys]
        say = lambda key, value: wording["needle"].format(kind=n.value, key=key, value=value)
        needles = [say(key, value) for key, of_key in zip(keys, values, strict=True) for value in of_key]
        draws.shuffle(needles)
        if n.haystack == "essay":
            context, gold = self._in_essay(needles, size, draws)
        else:
            if n.haystack == "noise":
                lines = [self._setting.materials.templates["haystack"]["noise"]] * size
            else:
                # Another value of a key that is asked for would make two answers right.
                other = lambda: self._draw(n.key, draws, keys if fresh else ())
                lines = [say(other(), self._draw(n.value, draws, ())) for _ in range(size)]
            places = sorted(draws.rng.sample(range(size), len(needles)))
            for place, needle in reversed(list(zip(places, needles, strict=True))):
                lines.insert(place, needle)
            context, gold = "\n".join(lines), tuple(place + i for i, place in enumerate(places))
        asked = draws.rng.sample(range(len(keys)), n.queries)
        names = [keys[i] for i in asked]
        query = names[0] if len(names) == 1 else ", ".join(names[:-1]) + ", and " + names[-1]
        form = "many" if plural else "one"
        return Draft(
            wording[f"context_{form}"].format(kind=kind, context=context, query=query),
            wording[f"question_{form}"].format(kind=kind, query=query),
            wording[f"prefix_{form}"].format(kind=kind, query=query),
            tuple(value for i in asked for value in values[i]),
            gold,
        )

    def _in_essay(self, needles: list[str], size: int, draws: Draws) -> tuple[str, tuple[int, ...]]:
        sentences = self._setting.materials.essay.sentences(size)
        places = sorted(len(sentences) * depth // 100 for depth in draws.rng.sample(_DEPTHS, len(needles)))
        pieces: list[str] = []
        for start, end, needle in zip([0, *places], places, needles, strict=False):
            pieces += [*sentences[start:end], needle]
        pieces += sentences[places[-1] :]
        return " ".join(pieces), tuple(place + i for i, place in enumerate(places))

    def _draw(self, kind: Kind, draws: Draws, taken: Container[str]) -> str:
        while True:
            if kind == "numbers":
                drawn = str(draws.rng.randint(10**6, 10**7 - 1))
            elif kind == "uuids":
                drawn = str(uuid.UUID(int=draws.rng.getrandbits(128), version=4))
            else:
                drawn = draws.rng.choice(self._setting.materials.words.pairs)
            if drawn not in taken:
                return drawn
