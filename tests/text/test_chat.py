"""Chat templates against `transformers`, and their refusals."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
import pytest

from gapless.assets import demo_checkpoint, heldout
from gapless.errors import InvalidRequest, ModelError
from gapless.text.chat import ChatTemplate, EncodedPrompt

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from gapless.text.tokenizer import Tokenizer

SPECIAL = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
USER = {"role": "user", "content": "Is 1 < 2 & 'so' on? <b>café</b>"}
CHAT = [
    {"role": "system", "content": "Be brief.", "name": None},
    USER,
    {"role": "assistant", "content": "Yes.", "reasoning": "One is less."},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}, {"type": "text", "text": " "}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "look", "arguments": {"q": "é<1>", "n": [1, 2.5]}}}],
    },
    {"role": "tool", "content": "42"},
]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"q": {"enum": ["ü"]}}}}]

TEMPLATES = {
    "blocks are trimmed": """
      {%- for message in messages %}
        {% if loop.first %}
    [{{ message.role }}]
        {% endif %}
      {{ message.content }}
      {% endfor %}
    end
    """,
    "tojson": "{{ messages | tojson }}|{{ tools | tojson(indent=2) }}"
    "|{{ messages | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "loop controls": "{% for m in messages %}{% if m.role == 'tool' %}{% break %}{% endif %}"
    "{% if m.content is not string %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(seen=0) %}{% for m in messages %}"
    "{% set ns.seen = ns.seen + 1 %}{% endfor %}{{ ns.seen }}",
    "absent entries": "{% for m in messages %}{{ 'content' in m }}{{ m.name is defined }}"
    "{{ m.content is none }}{% endfor %}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}/{{ m.thinking }}/"
    "{{ m.reasoning }};{% endfor %}",
    "variables": "{{ eos_token }}{{ pad_token }}{{ bos_token is defined }}{{ tools is none }}"
    "{{ documents is none }}{{ mood }}{{ add_generation_prompt }}",
    "generation tag": "{% for m in messages %}{% generation %}\n{% set x = m.role %}{{ x }}\n"
    "  {% endgeneration %}\n{{ x is defined }}{% endfor %}",
    "time": "{{ strftime_now('%Y-%m') }}",
    "macro": "{% macro show(m, sep='-') %}{{ sep }}{{ m.role | upper }}{% endmacro %}"
    "{% for m in messages[::-1] %}{{ show(m, sep=loop.index0 | string) }}{% endfor %}",
    "methods": "{% for m in messages %}{{ m.items() | list | length }}"
    "{{ m.content is string and m.get('content', '').strip().split('<')[-1] }}{% endfor %}",
    "raises when it likes": "{% if messages[0].role == 'user' %}{{ raise_exception('no') }}"
    "{% endif %}ok",
}


def render(template: str, messages: list[dict[str, object]], **kwargs: object) -> str:
    return ChatTemplate({"default": template}, SPECIAL).render(messages, **kwargs)


@pytest.fixture(scope="module")
def demo(tokenizer: Tokenizer) -> ChatTemplate:
    return ChatTemplate.from_checkpoint(demo_checkpoint(), tokenizer)


@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_demo_prompts_equal_transformers(
    demo: ChatTemplate,
    tokenizer: Tokenizer,
    hf_tokenizer: PreTrainedTokenizerFast,
    add_generation_prompt: bool,
) -> None:
    for line in heldout("level1").read_text().splitlines()[:20]:
        item = json.loads(line)
        messages = [
            {"role": "user", "content": item["question"]},
            {"role": "assistant", "content": item["answer"]},
            USER,
        ]
        text = demo.render(messages, add_generation_prompt=add_generation_prompt)
        wanted = {"add_generation_prompt": add_generation_prompt}
        assert text == hf_tokenizer.apply_chat_template(messages, tokenize=False, **wanted)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == hf_tokenizer.apply_chat_template(messages, **wanted)["input_ids"]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_equal_transformers(
    hf_tokenizer: PreTrainedTokenizerFast, name: str, tools: list[dict[str, object]] | None
) -> None:
    kwargs = {"tools": tools, "mood": "fine", "add_generation_prompt": True}
    ours = render(TEMPLATES[name], CHAT, **kwargs)
    theirs = hf_tokenizer.apply_chat_template(
        CHAT, chat_template=TEMPLATES[name], tokenize=False, **kwargs
    )
    assert ours == theirs
    assert ours


def test_tojson_escapes_no_html() -> None:
    assert render("{{ messages[0].content | tojson }}", [USER]) == (
        "\"Is 1 < 2 & 'so' on? <b>café</b>\""
    )


TURN = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>go{% endif %}"


def encode(tokenizer: Tokenizer, template: str, **kwargs: object) -> EncodedPrompt:
    messages = [{"role": "user", "content": "one"}, {"role": "user", "content": "two"}]
    return ChatTemplate({"default": template}, SPECIAL).encode(tokenizer, messages, **kwargs)


def test_messages_end_where_the_generation_prompt_begins(tokenizer: Tokenizer) -> None:
    found = encode(tokenizer, TURN + PROMPT)
    body = "<|im_start|>one<|im_end|><|im_start|>two<|im_end|>"
    wanted = tokenizer.encode(body, add_special_tokens=False)
    assert found.message_end == len(wanted)
    whole = tokenizer.encode(body + "<|im_start|>go", add_special_tokens=False)
    assert found.token_ids == whole


@pytest.mark.parametrize(
    "template",
    [
        TURN,  # there is no generation prompt
        PROMPT + TURN,  # it comes first
        "{% if add_generation_prompt %}<|im_start|>go{% endif %}",  # nothing else is there
        TURN + "th{% if add_generation_prompt %}e{% endif %}",  # it joins the last token
        TURN + "{% if not add_generation_prompt %}<|im_end|><|im_end|>{% endif %}",
        "{% if not add_generation_prompt %}{{ raise_exception('no') }}{% endif %}" + TURN,
    ],
)
def test_where_messages_end_may_not_be_known(tokenizer: Tokenizer, template: str) -> None:
    found = encode(tokenizer, template)
    assert found.message_end is None
    text = render(template, [USER | {"content": "one"}, USER | {"content": "two"}])
    assert found.token_ids == tokenizer.encode(text, add_special_tokens=False)


def test_encoding_takes_the_variables_of_a_template(tokenizer: Tokenizer) -> None:
    template = TURN + "{{ mood }}" + PROMPT
    found = encode(tokenizer, template, mood="fine")
    assert tokenizer.decode(
        found.token_ids[: found.message_end], skip_special_tokens=False
    ).endswith("<|im_end|>fine")
    whole = encode(tokenizer, template, mood="fine", add_generation_prompt=False)
    assert whole.token_ids == found.token_ids[: found.message_end]
    assert whole.message_end is None


def test_encoding_refuses_what_rendering_does(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="refused the messages"):
        encode(tokenizer, "{{ raise_exception('no') }}")


def test_time_is_local() -> None:
    before = datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}", [USER]) in {
        before,
        datetime.now().strftime("%d %b %Y"),
    }


def test_generation_prompt_is_the_default() -> None:
    assert render("{{ add_generation_prompt }}", [USER]) == "True"


def test_keyword_overrides_special_token() -> None:
    assert render("{{ eos_token }}", [USER], eos_token="END") == "END"


def test_messages_are_left_alone() -> None:
    messages = [{"role": "assistant", "content": ["x"], "reasoning": "r", "name": None}]
    render("{{ messages[0].content[0] }}", messages)
    assert messages == [{"role": "assistant", "content": ["x"], "reasoning": "r", "name": None}]


@pytest.mark.parametrize(
    ("files", "tools", "text"),
    [
        ({"chat_template.jinja": "file", "chat_template": "entry"}, None, "file"),
        ({"chat_template": "entry"}, None, "entry"),
        ({"chat_template": {"default": "plain", "tool_use": "tools"}}, None, "plain"),
        ({"chat_template": {"default": "plain", "tool_use": "tools"}}, TOOLS, "tools"),
        ({"chat_template": {"default": "plain", "rag": "rag"}}, TOOLS, "plain"),
    ],
)
def test_template_is_found(
    tmp_path: Path,
    tokenizer: Tokenizer,
    files: dict[str, object],
    tools: list[dict[str, object]] | None,
    text: str,
) -> None:
    entry = files.get("chat_template")
    if isinstance(entry, dict):
        entry = [{"name": name, "template": source} for name, source in entry.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    if "chat_template.jinja" in files:
        (tmp_path / "chat_template.jinja").write_text(files["chat_template.jinja"])
    template = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    assert template.render([USER], tools=tools) == text


@pytest.mark.parametrize("entry", [3, ["x"], [{"name": "default"}], {"default": "x"}])
def test_malformed_entry_is_a_model_error(
    tmp_path: Path, tokenizer: Tokenizer, entry: object
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(ModelError, match="want a string, or a list"):
        ChatTemplate.from_checkpoint(tmp_path, tokenizer)


def test_invalid_jinja_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"'default' is not valid Jinja, line 2"):
        ChatTemplate({"default": "x\n{% for %}"}, {})


def test_no_template_refuses_with_a_remedy(tmp_path: Path, tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_checkpoint(tmp_path, tokenizer)
    with pytest.raises(InvalidRequest, match=r"has none; send the prompt as text, or put a chat_t"):
        template.render([USER])
    with pytest.raises(InvalidRequest, match=r"only templates named \['rag'\]"):
        ChatTemplate({"rag": "x"}, {}).render([USER])


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + messages[0]['absent']['deeper'] }}", "absent"),
        ("{{ 'a' + 1 }}", "concatenate|can only"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.index(3) }}", "not in list"),
        ("{{ messages | tojson(separators=3) }}", "unpack"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_raising_template_is_an_invalid_request(template: str, cause: str) -> None:
    with pytest.raises(InvalidRequest, match=f"refused the messages: .*{cause}.*; change the"):
        render(template, [USER])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ range(10**9) }}",
    ],
)
def test_templates_are_sandboxed(template: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template refused"):
        render(template, [USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "want a list of at least one message"),
        ("hello", "messages='hello': want a list"),
        ({"role": "user", "content": "x"}, "want a list"),
        (["hello"], r"messages\[0\]='hello': want an object with a `role`"),
        ([USER, {"content": "x"}], r"messages\[1\]"),
        ([{"role": 3, "content": "x"}], r"messages\[0\]"),
        ([{"role": "user", "content": [{"x": b"y"}]}], r"messages\[0\].content\[0\].x is a bytes"),
        ([{"role": "user", "content": np.zeros(2)}], r"content is a ndarray; .*convert it first"),
    ],
)
def test_bad_messages_are_refused(messages: object, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        render("{{ messages }}", messages)


def test_bad_variable_is_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\] is a function"):
        render("x", [USER], tools=[render])
