"""All tasks: what their prompts hold, that they are as large as fits, and that impossible ones are refused."""

import collections
import itertools
import math
import re

import pytest

from certjax.eval.tasks import ruler
from certjax.eval.tasks.ruler import parts, tasks

LENGTH = 4096
NIAH = [name for name in ruler.TASKS if name.startswith("niah")]


@pytest.fixture(scope="module")
def make(tokenizer, materials):
    def make(name, count=3, length=LENGTH, **options):
        options = {"materials": materials, **options}
        return list(ruler.generate(name, length=length, count=count, tokenizer=tokenizer, **options))

    return make


def builder_and_draws(sample, tokenizer, materials, seed=42):
    """What made a fresh sample, and generators in the state they had."""

    def tokens(draft):
        return sum(map(len, ruler.encode(tokenizer, draft.context, draft.question, draft.prefix)))

    setting = parts.Setting(sample.length, sample.budget, materials, None, seed, "fresh", tokens)
    draws = lambda: parts.fresh_draws(seed, sample.task, sample.length, sample.index)
    return ruler.TASKS[sample.task].make(setting), draws, tokens


@pytest.mark.parametrize("name", ruler.TASKS)
def test_one_more_unit_does_not_fit_and_few_tries_find_out(name, tokenizer, materials):
    tokenizer.calls, calls, samples = 0, [], []
    for sample in ruler.generate(name, length=LENGTH, count=3, tokenizer=tokenizer, materials=materials):
        calls.append(tokenizer.calls / 2)
        samples.append(sample)
        tokenizer.calls = 0
    assert calls[0] <= 4 * math.log2(samples[0].size) + (40 if name == "vt" else 8)  # vt: its example's size too
    assert max(calls[1:]) <= 2 * math.log2(samples[0].size) + 8
    for sample in samples:
        assert sample.tokens + sample.budget <= LENGTH
        builder, draws, tokens = builder_and_draws(sample, tokenizer, materials)
        assert tokens(builder.build(sample.size, draws(), sample.index)) == sample.tokens
        assert tokens(builder.build(sample.size + 1, draws(), sample.index)) + sample.budget > LENGTH


@pytest.mark.parametrize("policy", ["fresh", "compat"])
@pytest.mark.parametrize("name", ruler.TASKS)
def test_samples_are_reproducible_and_fit(name, policy, make):
    few, more = make(name, 1, policy=policy), make(name, 4, policy=policy)
    assert few == more[:1]
    assert all(sample.tokens + sample.budget <= LENGTH for sample in more)
    assert len({sample.context for sample in more}) == 4
    assert make(name, 1, policy=policy, seed=7)[0].context != few[0].context


def test_ids_are_unique(make):
    found = [
        sample.id for name in ("niah_single_1", "niah_multikey_3", "qa_1") for length in (3800, 4200)
        for policy in ("fresh", "compat") for seed in (1, 2)
        for sample in make(name, 2, length, policy=policy, seed=seed)
    ]  # fmt: skip
    assert len(set(found)) == len(found) == 3 * 2 * 2 * 2 * 2


@pytest.mark.parametrize("name", ruler.TASKS)
@pytest.mark.parametrize("policy", ["fresh", "compat"])
def test_impossible_lengths_are_refused(name, policy, make):
    with pytest.raises(ValueError, match=rf"{name} at length 140: .*length"):
        make(name, 1, 140, policy=policy)


@pytest.mark.parametrize("name", ["niah_single_1", "fwe", "qa_1"])
def test_a_tokenizer_that_cuts_off_does_not_keep_the_search_going(name, materials):
    class Cutting:
        def encode(self, text, add_bos=True):
            return [0] * min(len(text) // 4, 100)

    with pytest.raises(ValueError, match=r"does the tokenizer cut off|do not fill it"):
        list(ruler.generate(name, length=1024, count=1, tokenizer=Cutting(), materials=materials))
    if name == "fwe":
        with pytest.raises(ValueError, match="does the tokenizer cut off"):
            list(ruler.generate(name, length=1024, count=1, tokenizer=Cutting(), materials=materials, policy="compat"))


@pytest.mark.parametrize("name", NIAH)
def test_needles(name, make):
    for sample in make(name):
        plan = {"niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
        assert len(set(sample.references)) == plan
        pattern = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}" if "3" in name else r"\d{7}"
        for reference in sample.references:
            assert re.fullmatch(pattern, reference)
            assert sample.context.count(reference) == 1
        needles = sample.context.count("Among the secret")
        expected = {"niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
        assert needles == expected + (sample.size if name in ("niah_multikey_2", "niah_multikey_3") else 0)
        assert len(sample.gold) == expected
        hidden: dict[str, list[str]] = {}
        for key, value in re.findall(r"belongs? to ([\w-]+) is: ([\w-]+)", sample.context):
            hidden.setdefault(key, []).append(value)
        asked = [key for key in hidden if re.search(rf"(?<![\w-]){key}(?![\w-])", sample.question)]
        assert len(asked) == {"niah_multiquery": 4}.get(name, 1)
        assert sorted(value for key in asked for value in hidden[key]) == sorted(sample.references)
        forms = ("numbers" if plan > 1 else "number", "uuids" if plan > 1 else "uuid")
        assert any(f"secret {form} " in sample.question for form in forms)


def test_needles_lie_anywhere(make):
    for name in ("niah_single_1", "niah_single_2", "niah_multikey_2"):
        places = [sample.gold[0] for sample in make(name, 12)]
        assert len(set(places)) > 6


def test_variables(make):
    for sample in make("vt"):
        value = re.search(r"the value (\d{5})\?", sample.question)[1]
        lines = [line for line in sample.context.split("\n") if re.match(r"VAR [A-Z]{5} =", line)]
        assert lines[0] == f"VAR {sample.references[0]} = {value}"
        assert [line.split()[1] for line in lines] == list(sample.references)
        assert [line.split()[-1] for line in lines[1:]] == list(sample.references[:-1])
        example = re.findall(r"VAR ([A-Z]{3}) =", sample.context)
        assert len(example) == 5
        assert f"namely: {' '.join(example)}\n" in sample.context
        assert "5 variables" in sample.answer_prefix


def test_common_words(make):
    for sample in make("cwe"):
        example, main = (re.findall(r"\d+\. (\S+)", part) for part in sample.context.split("are:"))
        answers, main = main[:10], main[10:]
        count = collections.Counter(example)
        assert {word for word, n in count.items() if n == 10} == set(answers)
        assert sorted(count.values()) == [3] * 30 + [10] * 10
        count = collections.Counter(main)
        assert {word for word, n in count.items() if n == 30} == set(sample.references)
        assert set(count.values()) == {3, 30}
        assert len(count) == sample.size


def test_short_lists_have_lower_counts(make):
    sample = make("cwe", 1, 4000)[0]
    example, main = (re.findall(r"\d+\. (\S+)", part) for part in sample.context.split("are:"))
    assert sorted(collections.Counter(example).values()) == [1] * 10 + [3] * 10
    assert set(collections.Counter(main[10:]).values()) == {1, 6}


def test_coded_words(make):
    for sample in make("fwe"):
        count = collections.Counter(sample.context.split("\n")[1].split())
        ranked = count.most_common()
        assert ranked[0][0] == "..."
        assert tuple(word for word, _ in ranked[1:4]) == sample.references
        for k, (_, n) in enumerate(ranked[:10], 1):
            assert n == int(sample.size / k**2 / (math.pi**2 / 6))
        assert all(re.fullmatch("[a-z]{6}", word) for word in list(count) if word != "...")


@pytest.mark.parametrize(("name", "hops"), [("qa_1", 1), ("qa_2", 2)])
def test_questions(name, hops, make, materials):
    samples = make(name, 6)
    for sample in samples:
        texts = re.split(r"Document \d+:\n", sample.context)[1:]
        assert len(texts) == sample.size
        assert len(sample.gold) == hops
        assert any(sample.references[0] in texts[place] for place in sample.gold)
        assert len(set(texts)) == len(texts)
    assert len({sample.gold[0] for sample in samples}) > 2
    assert len({sample.question for sample in samples}) == 6


# Where element 0 goes, by number of documents, with the published seed.
@pytest.mark.parametrize(
    ("count", "slot"), [(20, 18), (50, 19), (100, 70), (150, 12), (200, 55), (400, 234), (800, 625)]
)
def test_published_slots(count, slot):
    items = list(range(count))
    parts.Draws(None, 42).shuffle(items)
    assert items.index(0) == slot


def test_compat_places_are_alike_in_all_samples(make):
    for name in ("qa_1", "qa_2"):
        places = collections.defaultdict(set)
        for sample in make(name, 6, policy="compat"):
            places[sample.size].add(sample.gold)
        assert all(len(found) == 1 for found in places.values())
        assert len(places) < 6
    for name in ("cwe", "fwe"):
        places = collections.defaultdict(set)
        for sample in make(name, 6, policy="compat"):
            words = re.findall(r"\d+\. (\S+)", sample.context.split("are:")[-1])[10:]
            words = words if name == "cwe" else sample.context.split("\n")[1].split()
            places[sample.size].add(tuple(i for i, word in enumerate(words) if word in sample.references))
        assert all(len(found) == 1 for found in places.values())
        assert len(places) < 6
    lines = [
        tuple(i for i, line in enumerate(sample.context.split("\n")) if re.match("VAR [A-Z]{3} ", line))
        for sample in make("vt", 3, policy="compat")
    ]
    assert len(set(lines)) == 1


def test_compat_documents_are_everything_and_again(tokenizer, materials):
    corpus = materials.qa_1
    few = type(corpus)(corpus.documents[:6], corpus.items[:3], "few", "")
    setting = parts.Setting(LENGTH, 32, materials, None, 42, "compat", len)
    builder = tasks.questions.Builder(few, "qa_1", setting)
    draft = builder.build(14, parts.Draws(None, 42), 0)
    texts = re.split(r"\s*Document \d+:\n", draft.context.rstrip())[1:]
    assert sorted(collections.Counter(texts).values()) == [2, 2, 2, 2, 3, 3]
    small = type(materials)(**{**vars(materials), "qa_1": few})
    with pytest.raises(ValueError, match="all 6 documents that there are do not fill it"):
        next(ruler.generate("qa_1", length=LENGTH, count=1, tokenizer=tokenizer, materials=small))


def test_chat_format_and_answer_prefix(make, materials):
    form = materials.chat["chatml"]
    for name, policy in itertools.product(("vt", "cwe", "qa_1"), ("fresh", "compat")):
        sample = make(name, 1, chat="chatml", policy=policy)[0]
        assert sample.context.startswith(form["before"])
        assert sample.question.endswith(form["after"])
        assert sample.tokens + sample.budget <= LENGTH
        twice = name == "cwe" and policy == "compat"
        assert sample.context.count(form["before"]) == 1 + twice
        assert (form["after"] in sample.context) == twice
    with_prefix, without = make("qa_1", 1)[0], make("qa_1", 1, prefix=False)[0]
    assert (with_prefix.answer_prefix, without.answer_prefix) == (" Answer:", "")


def test_mistakes(make):
    for options, message in (
        ({"name": "niah"}, "unknown task 'niah'"),
        ({"name": "vt", "policy": "old"}, "policy must be"),
        ({"name": "vt", "chat": "none"}, "unknown chat format"),
    ):
        with pytest.raises(ValueError, match=message):
            make(**options)
