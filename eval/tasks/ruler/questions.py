"""Questions about documents, the right ones among many others."""

from certjax.eval.tasks.ruler.documents import Corpus
from certjax.eval.tasks.ruler.parts import Draft, Draws, Setting, fresh_draws


class Builder:
    """See `parts.Builder`."""

    unit, step = "documents", 10

    def __init__(self, corpus: Corpus, task: str, setting: Setting):
        self._corpus, self._setting = corpus, setting
        self.floor = max(len(item.own) for item in corpus.items)
        self.ceiling = len(corpus.documents)
        self._order = list(range(len(corpus.items)))
        if setting.fresh:
            fresh_draws(setting.seed, task, "order of questions").shuffle(self._order)

    def build(self, size: int, draws: Draws, index: int) -> Draft:
        """A sample; `size` counts documents."""
        wording, documents = self._setting.materials.templates["qa"], self._corpus.documents
        item = self._corpus.items[self._order[index % len(self._order)]]
        chosen = list(item.own)
        if size >= len(documents) and not self._setting.fresh:
            chosen = [
                i % len(documents) for i in range(size)
            ]  # the published way: everything, and from the start again
        else:
            more = size - len(chosen)
            chosen += draws.rng.sample(item.related, min(len(item.related), max(more, 0)))
            if size > len(chosen):
                taken = set(chosen)
                rest = [i for i in range(len(documents)) if i not in taken]
                chosen += draws.rng.sample(rest, size - len(chosen))
        draws.shuffle(chosen)
        text = "\n\n".join(wording["document"].format(number=k, text=documents[i]) for k, i in enumerate(chosen, 1))
        return Draft(
            wording["context"].format(context=text, query=item.question),
            wording["question"].format(query=item.question),
            wording["prefix"].format(query=item.question),
            item.answers,
            tuple(place for place, i in enumerate(chosen) if i in item.gold),
        )
