"""Chat templates: what they see, one begin-of-text, and what goes wrong in them."""

import datetime
import json
import os

import pytest

from certjax.models import Tokenizer, checkpoints, convert
from certjax.models.chat import render_chat
from certjax.models.gguf import read_gguf

HELLO = [{"role": "user", "content": "hello"}]
TURNS = (
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role != 'user' %}\n{% continue %}\n    {% endif %}\n"
    "<|turn|>{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<|turn|>{% endif %}"
)


@pytest.fixture(scope="module")
def make(write_gguf):
    def build(template=TURNS, **config):
        source = read_gguf(write_gguf("llama", metadata={"tokenizer.chat_template": template}).path)
        return Tokenizer(source.tokenizer, source.tokenizer_config | config)

    return build


def test_blocks_controls_and_tokens(make):
    tokenizer = make()
    text = "<|begin|><|turn|>hello<|end|>"
    said = lambda **options: tokenizer.decode(tokenizer.apply_chat_template(HELLO, **options), skip_special=False)
    assert said() == text + "<|turn|>"
    assert said(add_generation_prompt=False) == text
    more = [{"role": "system", "content": "x"}, *HELLO]
    assert tokenizer.apply_chat_template(more) == tokenizer.apply_chat_template(HELLO)


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("printed", ["{{ bos_token }}", "<|begin|><|begin|>", ""])
def test_one_begin_of_text(make, add_bos, printed):
    """Row 66 of pitfalls.md: a second one is worth 20 points."""
    ids = make(printed + "hello", add_bos_token=add_bos).apply_chat_template(HELLO)
    assert ids.count(0) == (1 if add_bos or printed else 0)
    assert ids.index(0) == 0 if 0 in ids else not printed


def test_names_that_templates_use():
    render = lambda template, **variables: render_chat(template, HELLO, **variables)
    assert render("{{ tools | tojson }}", tools=[{"a": "<é'>"}]) == '[{"a": "<é\'>"}]'
    assert render("{{ x | tojson(indent=2) }}", x={"a": 1}) == '{\n  "a": 1\n}'
    assert render("{{ strftime_now('%Y') }}") == datetime.datetime.now().strftime("%Y")
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}!") == "hello!"
    assert render("{% if tools is defined %}a{% else %}b{% endif %}") == "b"
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses the conversation: roles must alternate"),
        ("\n{% if %}", "chat template, line 2: "),
        ("{{ messages.nothing.more }}", "fails on the conversation: UndefinedError"),
        ("{{ 1 + 'a' }}", "fails on the conversation: TypeError"),
        ("{{ messages.__class__.__mro__ }}", "fails on the conversation: SecurityError"),
        ("{{ messages.append(1) }}", "fails on the conversation: SecurityError"),
        ("{% include 'file' %}", "fails on the conversation"),
    ],
)
def test_mistakes_of_templates(template, message):
    with pytest.raises(ValueError, match=message):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages must be a list of at least one message, got \[\]"),
        ("hello", "messages must be a list"),
        (["hello"], r"messages\[0\] must be a mapping with role and content, got 'hello'"),
        ([*HELLO, {"role": "bot", "content": ""}], r"messages\[1\].role must be one of system, .*, got 'bot'"),
        ([{"content": "x"}], r"messages\[0\].role must be one of .*, got None"),
        ([{"role": "user"}], r"messages\[0\].content must be a string, got None"),
    ],
)
def test_mistakes_of_messages(make, messages, message):
    with pytest.raises(ValueError, match=message):
        make().apply_chat_template(messages)


def test_end_token_that_nobody_names(make):
    assert make("{{ eos_token }}", eos_token=None, eos_token_id=[2]).apply_chat_template(HELLO)[-1] == 2
    assert make("{{ eos_token }}").apply_chat_template(HELLO)[-1] == 1  # of two, the one that the file calls so
    with pytest.raises(ValueError, match="eos_token is not known: the model has 2 end tokens"):
        make("{{ eos_token }}", eos_token=None).apply_chat_template(HELLO)
    with pytest.raises(ValueError, match="chat_template must be a string or null, got 3"):
        make(chat_template=3)
    with pytest.raises(ValueError, match="the model has no chat template"):
        make(chat_template=None).apply_chat_template(HELLO)


def test_conversion_carries_the_template(write_gguf, tmp_path):
    file = write_gguf("llama", metadata={"tokenizer.chat_template": TURNS})
    convert(file.path, tmp_path / "model")
    loaded = checkpoints.load(tmp_path / "model")
    tokenizer = Tokenizer(loaded.tokenizer, json.loads(json.dumps(loaded.tokenizer_config)))
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO), skip_special=False).endswith("hello<|end|><|turn|>")


@pytest.mark.slow
@pytest.mark.skipif(
    "CERTJAX_DEMO_CHECKPOINT" not in os.environ,
    reason="CERTJAX_DEMO_CHECKPOINT is not set: `make test` makes the demo model",
)
def test_the_demo_models_template():
    loaded = checkpoints.load(os.environ["CERTJAX_DEMO_CHECKPOINT"])
    tokenizer = Tokenizer(loaded.tokenizer, loaded.tokenizer_config)
    ids = tokenizer.apply_chat_template([*HELLO, {"role": "assistant", "content": "Hi."}, *HELLO])
    assert tokenizer.decode(ids, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nHi.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert ids.count(1) == 5  # <|im_start|> is also what the file calls the begin-of-text token: none is added
