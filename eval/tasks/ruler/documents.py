"""Documents with questions: SQuAD and HotpotQA files in their published formats, or made-up towns."""

import dataclasses
import json
import random
from collections.abc import Callable
from typing import Any

from certjax.eval.tasks.ruler.templates import digest, read_bytes
from certjax.eval.tasks.ruler.words import made_up

_TOWNS = 3000  # of the made-up corpus: two documents each, some 400 000 tokens
_CRAFTS = (
    "baskets bells boats bread candles carpets cheese clocks flutes glass hats ink kites knives lamps paper pots ropes"
)
_MONTHS = "January February March April May June July August September October November December"


@dataclasses.dataclass(frozen=True)
class Item:
    """A question.

    Attributes:
      question: its text.
      answers: any of them counts.
      gold: indices of the documents that answer it.
      own: indices of the documents that go with it in every prompt, the gold ones among them.
      related: indices of those that are taken before any other.
    """

    question: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    own: tuple[int, ...]
    related: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents and questions about them.

    Attributes:
      documents: texts, all different.
      items: questions.
      name: what results call it.
      sha256: 16 hexadecimal digits of the file, or of the corpus where it is made up.
    """

    documents: tuple[str, ...]
    items: tuple[Item, ...]
    name: str
    sha256: str


def squad(path: str) -> Corpus:
    """SQuAD 2.0, such as dev-v2.0.json: its paragraphs, and its answerable questions with all annotators' answers.

    A question's own document is its paragraph; the other paragraphs of the article are related.

    Raises:
      ValueError: a file that cannot be read or has another form.
    """
    return _read(path, _squad_items, "SQuAD 2.0 (an object with data: articles, paragraphs, qas)")


def hotpot(path: str) -> Corpus:
    """HotpotQA with distractors, such as hotpot_dev_distractor_v1.json: all ten paragraphs of an item are its own.

    Raises:
      ValueError: a file that cannot be read or has another form.
    """
    return _read(path, _hotpot_items, "HotpotQA (a list of objects with question, answer, context, supporting_facts)")


def _read(path: str, parse: Callable[[Any], tuple[list[str], list[Item]]], form: str) -> Corpus:
    content = read_bytes(path)
    try:
        documents, items = parse(json.loads(content))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path}: is not {form}: {type(error).__name__}: {error}") from None
    if not items:
        raise ValueError(f"{path}: holds no question that has an answer")
    return Corpus(tuple(documents), tuple(items), path, digest(content))


def _squad_items(content: Any) -> tuple[list[str], list[Item]]:
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for paragraphs in articles for paragraph in paragraphs})
    index = {text: i for i, text in enumerate(documents)}
    items = []
    for paragraphs in articles:
        everywhere = [index[paragraph["context"]] for paragraph in paragraphs]
        for paragraph, gold in zip(paragraphs, everywhere, strict=True):
            related = tuple(dict.fromkeys(i for i in everywhere if i != gold))
            for qa in paragraph["qas"]:
                if not qa.get("is_impossible", False):
                    answers = tuple(dict.fromkeys(answer["text"] for answer in qa["answers"]))
                    items.append(Item(qa["question"], answers, (gold,), (gold,), related))
    return documents, items


def _hotpot_items(content: Any) -> tuple[list[str], list[Item]]:
    paragraph = lambda title, sentences: f"{title}\n{''.join(sentences)}"
    documents = sorted({paragraph(*entry) for item in content for entry in item["context"]})
    index = {text: i for i, text in enumerate(documents)}
    items = []
    for item in content:
        titles = {title for title, _ in item["supporting_facts"]}
        own = tuple(dict.fromkeys(index[paragraph(*entry)] for entry in item["context"]))
        gold = tuple(i for i in own if documents[i].split("\n", 1)[0] in titles)
        items.append(Item(item["question"], (item["answer"],), gold, own))
    return documents, items


def towns(hops: int) -> Corpus:
    """A made-up corpus of our own, for want of a file: short notes on towns that do not exist and on their founders.

    It is no substitute for SQuAD or HotpotQA: the notes are all of one form, and their questions ask for one of its
    blanks.

    Args:
      hops: 1 asks who founded a town (one document); 2 asks where the founder of a town was born (two documents).
    """
    rng = random.Random(hops)
    names = [name.capitalize() for name in made_up(4 * _TOWNS)]
    rng.shuffle(names)
    towns, first, last, rivers = (names[i * _TOWNS : (i + 1) * _TOWNS] for i in range(4))
    founders = [f"{a} {b}" for a, b in zip(first, last, strict=True)]
    births = [rng.choice(towns) for _ in towns]
    crafts, months = _CRAFTS.split(), _MONTHS.split()
    documents, items = [], []
    for i, (town, founder, river, birth) in enumerate(zip(towns, founders, rivers, births, strict=True)):
        a, b = rng.sample(crafts, 2)
        documents += [
            f"{town} is a town on the river {river}. It was founded by {founder} in {rng.randrange(1100, 1900)} and "
            f"has about {rng.randrange(12, 900)} hundred inhabitants. It is known for its {a} and its {b}. The fair of "
            f"{town} is held every {rng.choice(months)}, when boats come up the {river} from the coast.",
            f"{founder} was a maker of {rng.choice(crafts)} who was born in {birth}. At the age of "
            f"{rng.randrange(16, 60)} the family moved away and took up the trade in {a}. {founder} wrote "
            f"{rng.choice(('two', 'three', 'four'))} books of travels, now kept in a library, and died in "
            f"{rng.choice(months)}.",
        ]
        if hops == 1:
            items.append(Item(f"Who founded the town of {town}?", (founder,), (2 * i,), (2 * i,)))
        else:
            question = f"In which town was the founder of {town} born?"
            items.append(Item(question, (birth,), (2 * i, 2 * i + 1), (2 * i, 2 * i + 1)))
    return Corpus(tuple(documents), tuple(items), f"made-up towns 1, {hops} hop", digest(documents))
