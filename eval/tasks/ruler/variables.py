"""Variable tracking: a chain of assignments hidden in noise, after one solved example."""

import itertools
import string

from certjax.eval.tasks.ruler.parts import Draft, Draws, Setting, fresh_draws
from certjax.eval.tasks.ruler.sizing import largest

_HOPS = 4
_EXAMPLE_TOKENS = 500


class Builder:
    """See `parts.Builder`."""

    unit, floor, ceiling = "lines", 5, None

    def __init__(self, setting: Setting):
        self._setting = setting
        self.step = 10 if setting.length >= 4096 else 5

        def tokens(size: int) -> int:
            draws = fresh_draws(setting.seed, "vt example")
            return setting.tokens(self._chain(size, draws, 3, "12345")) + setting.budget

        limit = max(_EXAMPLE_TOKENS, tokens(self.floor))  # the published example takes at most so many
        self._example_size = largest(tokens, limit, floor=self.floor, ceiling=None, guess=self.floor)

    def build(self, size: int, draws: Draws, index: int) -> Draft:
        """A sample; `size` counts lines of noise."""
        del index
        # The published example has its lines in the same places in every sample, with new names and another value.
        places = draws if self._setting.fresh else fresh_draws(self._setting.seed, "vt example places")
        value = str(draws.rng.randint(10_000, 99_998))
        other = str(draws.rng.randint(10_000, 99_998))
        while other == value and self._setting.fresh:
            other = str(draws.rng.randint(10_000, 99_998))
        example = self._chain(self._example_size, draws, 3, other, places)
        draft = self._chain(size, draws, 5, value)
        shown = f"{example.context}{example.question}{example.prefix} {' '.join(example.references)}\n"
        return Draft(shown + draft.context, draft.question, draft.prefix, draft.references, draft.gold)

    def _chain(self, size: int, draws: Draws, letters: int, value: str, places: Draws | None = None) -> Draft:
        tables = self._setting.materials.templates
        wording = tables["vt"]
        names: list[str] = []
        while len(names) <= _HOPS:
            name = "".join(draws.rng.choices(string.ascii_uppercase, k=letters))
            if name not in names:
                names.append(name)
        chain = [wording["first"].format(name=names[0], value=value)]
        chain += [wording["next"].format(name=b, previous=a) for a, b in itertools.pairwise(names)]
        lines = [tables["haystack"]["noise"]] * size
        at = sorted((places or draws).rng.sample(range(size), len(chain)))
        for place, line in reversed(list(zip(at, chain, strict=True))):
            lines.insert(place, line)
        fields = {"query": value, "count": len(names)}
        return Draft(
            wording["context"].format(context="\n".join(lines), **fields),
            wording["question"].format(**fields),
            wording["prefix"].format(**fields),
            tuple(names),
            tuple(place + i for i, place in enumerate(at)),
        )
