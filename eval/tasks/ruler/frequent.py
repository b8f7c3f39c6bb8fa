"""Common and frequent words: which words of a list come up most often."""

import math
import string

from certjax.eval.tasks.ruler.parts import Draft, Draws, Setting
from certjax.eval.tasks.ruler.sizing import DoesNotFitError

_COMMON = 10
_LETTERS, _ALPHA, _ZETA = 6, 2, math.pi**2 / 6  # ζ(2)


class CommonBuilder:
    """See `parts.Builder`: ten words come up far more often than the others; after one solved example."""

    unit, floor, step = "words", 20, 10

    def __init__(self, setting: Setting):
        self._setting = setting
        self.ceiling = len(setting.materials.words.more)
        short = setting.length < 4096
        self._times = (6, 1) if short else (30, 3)
        self._example_size, self._example_times = (20, (3, 1)) if short else (40, (10, 3))

    def build(self, size: int, draws: Draws, index: int) -> Draft:
        """A sample; `size` counts different words."""
        del index
        example = self._list(self._example_size, self._example_times, draws)
        draft = self._list(size, self._times, draws)
        answers = " ".join(f"{i}. {word}" for i, word in enumerate(example.references, 1))
        before, after = "", ""
        if self._setting.chat is not None and not self._setting.fresh:
            # The published example is a whole turn, and stands within the user's turn: two headers, two ends.
            before, after = self._setting.chat["before"], self._setting.chat["after"]
        shown = f"{example.context}{example.question}{after}{example.prefix} {answers}\n{before}"
        return Draft(shown + draft.context, draft.question, draft.prefix, draft.references)

    def _list(self, size: int, times: tuple[int, int], draws: Draws) -> Draft:
        words, wording = self._setting.materials.words, self._setting.materials.templates["cwe"]
        pool = words.single if size <= len(words.single) else words.more
        chosen = draws.rng.sample(pool, min(size, len(pool)))
        listed = chosen[:_COMMON] * times[0] + chosen[_COMMON:] * times[1]
        draws.shuffle(listed)
        text = " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1))
        return Draft(
            wording["context"].format(context=text), wording["question"], wording["prefix"], tuple(chosen[:_COMMON])
        )


class CodedBuilder:
    """See `parts.Builder`: coded words whose frequencies follow a zeta distribution; the most frequent is "..."."""

    unit, floor, ceiling = "words", 100, None

    def __init__(self, setting: Setting):
        self._setting = setting
        self._room = setting.length - setting.budget
        if self._room // 50 < 5:
            raise DoesNotFitError(f"needs a length of at least {250 + setting.budget}")
        self.step = max(self._room // 32, 1)

    def build(self, size: int, draws: Draws, index: int) -> Draft:
        """A sample; `size` is the number of words that the distribution shares out, whole parts only."""
        del index
        wording = self._setting.materials.templates["fwe"]
        drawn: dict[str, None] = {}
        while len(drawn) < self._room // 50:
            drawn["".join(draws.rng.choices(string.ascii_lowercase, k=_LETTERS))] = None
        vocabulary = sorted(drawn)
        draws.shuffle(vocabulary)
        vocabulary[0] = "..."
        text = [word for k, word in enumerate(vocabulary, 1) for _ in range(int(size * k**-_ALPHA / _ZETA))]
        draws.shuffle(text)
        return Draft(
            wording["context"].format(context=" ".join(text)),
            wording["question"],
            wording["prefix"],
            tuple(vocabulary[1:4]),
        )
