"""The thirteen tasks, and samples of them."""

import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Literal, Protocol

from certjax.eval.tasks.ruler import frequent, niah, questions, variables
from certjax.eval.tasks.ruler.niah import Needles
from certjax.eval.tasks.ruler.parts import Builder, Draft, Draws, Materials, Policy, Setting, fresh_draws
from certjax.eval.tasks.ruler.sizing import DoesNotFitError, check_growth, halved, largest

# Raise it when a sample of the same seed and materials would change.
GENERATOR_VERSION = 1


class Encoder(Protocol):
    """What is needed of a tokenizer; `certjax.models.Tokenizer` is one."""

    def encode(self, text: str, add_bos: bool = True) -> list[int]:
        """Token ids of a text."""
        ...


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      budget: tokens that an answer may take.
      metric: "all": the share of the references that an answer contains; "part": whether it contains any.
      make: from a setting to a builder.
    """

    budget: int
    metric: Literal["all", "part"]
    make: Callable[[Setting], Builder]


def _niah(needles: Needles) -> Task:
    return Task(128, "all", lambda setting: niah.Builder(needles, setting))


TASKS: dict[str, Task] = {
    "niah_single_1": _niah(Needles("noise")),
    "niah_single_2": _niah(Needles("essay")),
    "niah_single_3": _niah(Needles("essay", value="uuids")),
    "niah_multikey_1": _niah(Needles("essay", keys=4)),
    "niah_multikey_2": _niah(Needles("needle")),
    "niah_multikey_3": _niah(Needles("needle", key="uuids", value="uuids")),
    "niah_multivalue": _niah(Needles("essay", values=4)),
    "niah_multiquery": _niah(Needles("essay", queries=4)),
    "vt": Task(30, "all", variables.Builder),
    "cwe": Task(120, "all", frequent.CommonBuilder),
    "fwe": Task(50, "all", frequent.CodedBuilder),
    "qa_1": Task(32, "part", lambda setting: questions.Builder(setting.materials.qa_1, "qa_1", setting)),
    "qa_2": Task(32, "part", lambda setting: questions.Builder(setting.materials.qa_2, "qa_2", setting)),
}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A prompt and what is right.

    Attributes:
      id: different for every sample of a run: task, length, policy with seed, index.
      task: its name.
      length: tokens of prompt and answer at most.
      index: of the sample among those of its task and length.
      context: first part of the prompt, in setup B what is read with dense attention.
      question: second part.
      answer_prefix: last part, "" where the set has none.
      references: right answers.
      budget: tokens that the answer may take.
      metric: see `Task`.
      tokens: of the prompt.
      size: of what the haystack is made of, in `unit`.
      unit: what that is.
      gold: see `parts.Draft`.
    """

    id: str
    task: str
    length: int
    index: int
    context: str
    question: str
    answer_prefix: str
    references: tuple[str, ...]
    budget: int
    metric: Literal["all", "part"]
    tokens: int
    size: int
    unit: str
    gold: tuple[int, ...]


def encode(tokenizer: Encoder, context: str, question: str, prefix: str) -> tuple[list[int], list[int]]:
    """Ids of the context, and of question and answer prefix: encoded apart, so that both setups see the same ids."""
    return tokenizer.encode(context), tokenizer.encode(question + prefix, add_bos=False)


def generate(
    name: str,
    *,
    length: int,
    count: int,
    tokenizer: Encoder,
    materials: Materials,
    seed: int = 42,
    policy: Policy = "fresh",
    prefix: bool = True,
    chat: str | None = None,
) -> Iterator[Sample]:
    """Samples of one task and length, each as large as fits: prompt tokens + budget ≤ length.

    Policy "fresh": a sample is drawn from seed, task, length and index alone; its size is searched for, from that of
    the sample before on, so that one more unit would not fit; everything is shuffled by its own generator. Policy
    "compat" has the published generators' habits: one generator for all samples, which the search for the size uses up
    too; shuffles of needles, of word lists and of documents by a generator that begins anew with the seed each time, so
    that gold documents and common words have the same places in all samples of a size; all samples begin at one size
    and shrink by one step where they are too long; cwe's example repeats the chat format. It does not reproduce their
    bits.

    Args:
      name: one of `TASKS`.
      length: tokens.
      count: samples.
      tokenizer: counts them. Context and the rest are encoded apart.
      materials: from `load_materials`.
      seed: of everything random.
      policy: see above.
      prefix: whether the prompt ends with the beginning of the answer.
      chat: name of a chat format of the materials; None for plain continuation.

    Raises:
      ValueError: an unknown name, or a length that even the smallest sample, or no sample for want of documents or
        words, fills.

    Cost: O(log size) tokenizations for the first sample; for others those that follow from the previous one's size
    ("compat": 1 + one for each step).
    """
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}, expected one of {', '.join(TASKS)}")
    if policy not in ("fresh", "compat"):
        raise ValueError(f'policy must be "fresh" or "compat", got {policy!r}')
    if chat is not None and chat not in materials.chat:
        raise ValueError(f"unknown chat format {chat!r}, expected one of {', '.join(materials.chat)}")
    task = TASKS[name]
    form = None if chat is None else materials.chat[chat]

    def parts(draft: Draft) -> tuple[str, str, str]:
        before, after = ("", "") if form is None else (form["before"], form["after"])
        return before + draft.context, draft.question + after, draft.prefix if prefix else ""

    def tokens(draft: Draft) -> int:
        return sum(map(len, encode(tokenizer, *parts(draft))))

    setting = Setting(length, task.budget, materials, form, seed, policy, tokens)
    try:
        builder = task.make(setting)
        drafts = (_fresh if policy == "fresh" else _compat)(name, builder, setting, count)
        for index, (size, draft) in enumerate(drafts):
            context, question, answer_prefix = parts(draft)
            yield Sample(
                f"{name}-{length}-{policy}{seed}-{index:05d}", name, length, index, context, question, answer_prefix,
                draft.references, task.budget, task.metric, tokens(draft), size, builder.unit, draft.gold,
            )  # fmt: skip
    except DoesNotFitError as error:
        raise ValueError(f"{name} at length {length}: {error}") from None


def _fresh(name: str, builder: Builder, setting: Setting, count: int) -> Iterator[tuple[int, Draft]]:
    room, guess = setting.length - setting.budget, builder.floor
    for index in range(count):
        build = lambda size, i=index: builder.build(size, fresh_draws(setting.seed, name, setting.length, i), i)
        guess = largest(
            lambda size, build=build: setting.tokens(build(size)),
            room, floor=builder.floor, ceiling=builder.ceiling, guess=guess,
        )  # fmt: skip
        if guess == builder.ceiling:
            raise DoesNotFitError(f"all {guess} {builder.unit} that there are do not fill it; give a larger file")
        yield guess, build(guess)


def _compat(name: str, builder: Builder, setting: Setting, count: int) -> Iterator[tuple[int, Draft]]:
    draws, room, step = Draws(random.Random(setting.seed), setting.seed), setting.length - setting.budget, builder.step
    tokens = lambda size: setting.tokens(builder.build(size, draws, 0))
    if name == "fwe":
        size = room // 6
        while (found := tokens(size)) <= room:
            check_growth(size, found, room)
            size += step
        size -= step
    else:
        many = 4096 if name == "cwe" else step
        most = max((2 if name == "cwe" else 3) * setting.length * many // max(tokens(many), 1), 2 * step)
        size = halved(tokens, room, low=step, high=most) or step
    for index in range(count):
        used = size
        while setting.tokens(draft := builder.build(used, draws, index)) > room:
            if used <= step:
                raise DoesNotFitError(
                    f"{used} {builder.unit} take more than the {room} tokens that the answer leaves; ask for a greater "
                    "length"
                )
            used -= step
        yield used, draft
