"""Files of users: wording, words, essays, SQuAD and HotpotQA in their published forms."""

import json

import pytest

from certjax.eval.tasks import ruler
from certjax.eval.tasks.ruler import documents, templates, texts, words

SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Tea",
            "paragraphs": [
                {
                    "context": "Tea came from China.",
                    "qas": [
                        {
                            "question": "Where did tea come from?",
                            "id": "1",
                            "is_impossible": False,
                            "answers": [{"text": x, "answer_start": 14} for x in ("China", "from China", "China")],
                        },
                        {"question": "Who drank it?", "id": "2", "is_impossible": True, "answers": []},
                    ],
                },
                {"context": "Milk goes in.", "qas": []},
            ],
        },
        {"title": "Salt", "paragraphs": [{"context": "Salt is white.", "qas": []}]},
    ],
}
HOTPOT = [
    {
        "_id": "5a",
        "question": "Where was the author of Alpha born?",
        "answer": "Bath",
        "type": "bridge",
        "level": "hard",
        "supporting_facts": [["Alpha", 0], ["Ann", 0]],
        "context": [
            ["Zeta", ["A letter."]],
            ["Alpha", ["A book by Ann.", " It sold."]],
            ["Ann", ["Ann is from Bath."]],
        ],
    }
]


@pytest.fixture
def put(tmp_path):
    def put(name, content):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return put


def test_squad(put):
    corpus = documents.squad(put("dev-v2.0.json", SQUAD))
    assert corpus.documents == ("Milk goes in.", "Salt is white.", "Tea came from China.")
    (item,) = corpus.items  # the unanswerable one is left out
    assert item.answers == ("China", "from China")
    assert (item.gold, item.own, item.related) == ((2,), (2,), (0,))


def test_hotpot(put):
    corpus = documents.hotpot(put("hotpot.json", HOTPOT))
    assert corpus.documents == ("Alpha\nA book by Ann. It sold.", "Ann\nAnn is from Bath.", "Zeta\nA letter.")
    (item,) = corpus.items
    assert (item.answers, item.gold, item.own) == (("Bath",), (0, 1), (2, 0, 1))


def test_users_documents_are_asked_about(put, tokenizer):
    articles = [
        {
            "title": f"T{i}",
            "paragraphs": [
                {"context": f"Fact {i} {j}. " + "word " * 40, "qas": [
                    {"question": f"Q {i} {j}?", "is_impossible": False, "answers": [{"text": f"fact {i} {j}"}]}]}
                for j in range(6)
            ],
        }
        for i in range(30)
    ]  # fmt: skip
    materials = ruler.load_materials(squad_file=put("squad.json", {"data": articles}))
    for sample in ruler.generate("qa_1", length=2048, count=4, tokenizer=tokenizer, materials=materials):
        _, i, j = sample.references[0].split()
        assert f"Q {i} {j}?" in sample.question
        for related in range(6):  # the rest of the article comes before other articles
            assert f"Fact {i} {related}." in sample.context


@pytest.mark.parametrize(
    ("load", "content", "message"),
    [
        (documents.squad, [], r"is not SQuAD 2\.0"),
        (documents.squad, {"data": []}, "holds no question"),
        (documents.hotpot, {"data": []}, "is not HotpotQA"),
        (documents.hotpot, "{", "is not HotpotQA"),
        (words.load, {"nouns": ["a"]}, "must hold the lists"),
        (words.load, {"nouns": ["a"], "adjectives": [], "verbs": ["b"]}, "adjectives must be a list of words"),
        (texts.load, {"text": " \n"}, "holds no text"),
        (texts.load, {"text": 3}, 'object with a string "text"'),
        (templates.load, {"poem": {}}, "unknown table 'poem'"),
        (templates.load, {"qa": {"poem": ""}}, r"unknown string qa\.poem"),
        (templates.load, {"qa": {"question": "What?"}}, r"qa\.question has the fields \[\], expected \['query'\]"),
        (templates.load, {"qa": {"question": "{query} {x}"}}, r"has the fields \['query', 'x'\]"),
        (templates.load, {"qa": {"question": "{query"}}, r"qa\.question: "),
        (templates.load, {"qa": 3}, "qa must be a table"),
        (templates.load, {"qa": {"question": 3}}, r"qa\.question must be a string"),
        (templates.load, {"chat": {"mine": {"before": ""}}}, r"chat\.mine must hold the strings before and after"),
        (templates.load, [], "must hold an object"),
    ],
)
def test_files_that_do_not_fit(load, content, message, put):
    with pytest.raises(ValueError, match=message):
        load(put("file.json", content))


@pytest.mark.parametrize("load", [documents.squad, documents.hotpot, words.load, texts.load, templates.load])
def test_missing_files(load):
    with pytest.raises(ValueError, match=r"nowhere\.json: cannot be read"):
        load("nowhere.json")


def test_templates_replace_parts_of_ours(put, tokenizer):
    ours = ruler.load_materials()
    toml = put("t.toml", '[qa]\nquestion = "ASK {query} {{now}}"\n[chat.mine]\nbefore = "<u>"\nafter = "<a>"\n')
    materials = ruler.load_materials(template_file=toml)
    options = {"length": 1000, "count": 1, "tokenizer": tokenizer, "materials": materials, "chat": "mine"}
    (sample,) = ruler.generate("qa_1", **options)
    assert sample.question.startswith("ASK Who founded")
    assert sample.question.endswith("{now}<a>")
    assert sample.context.startswith("<u>Find the answer")
    assert materials.templates["niah"] == ours.templates["niah"]
    assert templates.digest(materials.templates) != templates.digest(ours.templates)


def test_every_string_of_ours_has_the_fields_that_a_file_must_have(put):
    path = put("ours.json", {**templates.DEFAULTS, "chat": templates.CHAT})
    assert templates.load(path) == templates.load(None)


def test_words_and_essay_of_a_file(put, tokenizer):
    listed = {"nouns": ["n1", "n2"], "adjectives": ["a1"], "verbs": ["v1"]}
    materials = ruler.load_materials(
        word_file=put("words.json", listed), essay_file=put("essay.json", {"text": "One two. Three four! Five"})
    )
    assert materials.words.pairs == ["a1-n1", "a1-n2"]
    assert materials.words.single == ["a1", "n1", "n2", "v1"]
    assert materials.essay.sentences(7) == ("One two.", "Three four!", "Five One two.")
    (sample,) = ruler.generate("niah_single_2", length=1000, count=1, tokenizer=tokenizer, materials=materials)
    assert "belongs to a1-n" in sample.question
    assert "Three four! Five One two." in sample.context
    with pytest.raises(ValueError, match="needs more than 4 pairs of adjective and noun, the word lists make 2"):
        list(ruler.generate("niah_multikey_1", length=1000, count=1, tokenizer=tokenizer, materials=materials))


def test_made_up_words_are_many_and_differ():
    assert len(set(words.made_up(5000))) == 5000
    assert words.made_up(5000)[:100] == words.made_up(100)
