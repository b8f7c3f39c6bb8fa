"""What the families of tasks have in common: the parts of a prompt, where randomness comes from, what may be used."""

import dataclasses
import hashlib
import random
from collections.abc import Callable
from typing import Any, Literal, Protocol

from certjax.eval.tasks.ruler import documents, templates, texts, words

Policy = Literal["fresh", "compat"]


@dataclasses.dataclass(frozen=True)
class Draft:
    """A prompt in three parts, to be joined as they are, and what is right.

    Attributes:
      context: what is read before the question is known.
      question: the question.
      prefix: beginning of the answer.
      references: right answers.
      gold: where the evidence lies, as indices of units (lines, sentences, documents); empty where it is everywhere.
    """

    context: str
    question: str
    prefix: str
    references: tuple[str, ...]
    gold: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Draws:
    """Randomness of a sample.

    Attributes:
      rng: for everything that is drawn.
      reorder: the seed of a new generator for every shuffle (policy "compat"), or None to shuffle with `rng`.
    """

    rng: random.Random
    reorder: int | None

    def shuffle(self, items: list[Any]) -> None:
        """Shuffles in place."""
        (self.rng if self.reorder is None else random.Random(self.reorder)).shuffle(items)


def fresh_draws(seed: int, *what: Any) -> Draws:
    """Draws that depend on all arguments and on nothing else."""
    text = "/".join(map(str, (seed, *what)))
    return Draws(random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest()[:16])), None)


@dataclasses.dataclass(frozen=True)
class Materials:
    """What prompts are made from; `load_materials` makes it.

    Attributes:
      templates: the wording.
      chat: what goes round a user's turn, by name.
      words: for keys and lists.
      essay: running text.
      qa_1: documents with questions of one document.
      qa_2: documents with questions of two.
    """

    templates: templates.Templates
    chat: dict[str, dict[str, str]]
    words: words.Words
    essay: texts.Essay
    qa_1: documents.Corpus
    qa_2: documents.Corpus


def load_materials(
    *,
    template_file: str | None = None,
    word_file: str | None = None,
    essay_file: str | None = None,
    squad_file: str | None = None,
    hotpot_file: str | None = None,
) -> Materials:
    """Reads what the user has, and takes ours for the rest.

    Args:
      template_file: see `templates.load`.
      word_file: see `words.load`.
      essay_file: see `texts.load`.
      squad_file: see `documents.squad`; without it qa_1 asks about made-up towns.
      hotpot_file: see `documents.hotpot`; without it qa_2 asks about made-up towns.

    Raises:
      ValueError: a file that cannot be used.
    """
    wording, chat = templates.load(template_file)
    return Materials(
        wording,
        chat,
        words.load(word_file),
        texts.load(essay_file),
        documents.towns(1) if squad_file is None else documents.squad(squad_file),
        documents.towns(2) if hotpot_file is None else documents.hotpot(hotpot_file),
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a builder is given.

    Attributes:
      length: tokens of prompt and answer together.
      budget: tokens of the answer.
      materials: what prompts are made from.
      chat: what goes round a user's turn, or None.
      seed: of the whole set.
      policy: "fresh" or "compat".
      tokens: counts those of a draft, chat included.
    """

    length: int
    budget: int
    materials: Materials
    chat: dict[str, str] | None
    seed: int
    policy: Policy
    tokens: Callable[[Draft], int]

    @property
    def fresh(self) -> bool:
        """Whether the published generators' quirks are left out."""
        return self.policy == "fresh"


class Builder(Protocol):
    """Makes prompts of one task.

    Attributes:
      unit: what a size counts.
      floor: smallest size that makes sense ("fresh").
      step: smallest size, and what is taken away from a prompt that is too long ("compat").
      ceiling: largest size, or None.
    """

    unit: str
    floor: int
    step: int
    ceiling: int | None

    def build(self, size: int, draws: Draws, index: int) -> Draft:
        """Sample `index` of a size."""
        ...
