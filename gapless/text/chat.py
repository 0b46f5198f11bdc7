"""Chat messages to prompt text, through the Jinja template that a checkpoint carries.

Templates come with models from anywhere, so they run sandboxed and see plain JSON values only.
What they may use follows `transformers.PreTrainedTokenizerBase.apply_chat_template`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gapless.errors import InvalidRequest, ModelError
from gapless.text.tokenizer import Tokenizer, read_tokenizer_config

if TYPE_CHECKING:
    from pathlib import Path

    from jinja2.parser import Parser

# what evaluating a template can raise, beside Jinja's own errors
_TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    ArithmeticError,
    AttributeError,
    RecursionError,
)
# older names of a message's reasoning; templates read the first, some the second
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it."""

    token_ids: Sequence[int]
    message_end: int | None = None
    """Tokens of a chat's messages, without the generation prompt after them; None where it is not
    known. The chat's next turn begins with these tokens, whatever becomes of the answer."""


class ChatTemplate:
    """The chat templates of one checkpoint; without any, `render` refuses and the rest works."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """Compile `templates`: "default" and perhaps "tool_use", used when tools are given.

        `special_tokens` become variables of the template, such as `bos_token`.

        Raises:
            ModelError: a template is not valid Jinja.
        """
        environment = _environment()
        self._special_tokens = dict(special_tokens)
        self._templates = {
            name: _compile(environment, name, source) for name, source in templates.items()
        }

    @classmethod
    def from_checkpoint(cls, checkpoint: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Take `chat_template.jinja`, else `chat_template` of tokenizer_config.json.

        Raises:
            ModelError: the entry is neither a string nor a list of named templates, or is not
                valid Jinja.
        """
        file = checkpoint / "chat_template.jinja"
        if file.is_file():
            templates = {"default": file.read_text(encoding="utf-8")}
        else:
            templates = _configured_templates(read_tokenizer_config(checkpoint))
        return cls(templates, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> str:
        """Return the prompt text of `messages`; encode it without adding special tokens.

        Each message is a mapping with a `role`; entries that are None count as absent. `kwargs`
        become variables of the template (`tools`, `documents`, `enable_thinking`, ...).

        Raises:
            InvalidRequest: there is no template, the messages are malformed, or the template
                refuses them.
        """
        template = self._choose(has_tools=kwargs.get("tools") is not None)
        variables: dict[str, object] = {"tools": None, "documents": None, **self._special_tokens}
        variables.update({name: _plain(value, name) for name, value in kwargs.items()})
        plain_messages = _checked_messages(messages)
        try:
            return template.render(
                {
                    **variables,
                    "messages": plain_messages,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the model's chat template refused the messages: {error}; change the messages, "
                "or send the prompt as text"
            ) from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Mapping[str, object]],
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: object,
    ) -> EncodedPrompt:
        """Return the token ids of `messages`; arguments and errors are those of `render`."""
        text = self.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)
        ids = tokenizer.encode(text, add_special_tokens=False)
        if not add_generation_prompt:
            return EncodedPrompt(ids)
        try:
            body = self.render(messages, add_generation_prompt=False, **kwargs)
        except InvalidRequest:
            # a template may insist on a generation prompt after the user's turn
            return EncodedPrompt(ids)
        body_ids = tokenizer.encode(body, add_special_tokens=False)
        end = len(body_ids)
        is_prefix = 0 < end < len(ids) and ids[:end] == body_ids
        return EncodedPrompt(ids, end if is_prefix else None)

    def _choose(self, *, has_tools: bool) -> jinja2.Template:
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        found = f"only templates named {sorted(self._templates)}" if self._templates else "none"
        raise InvalidRequest(
            f"a chat needs the model's default chat template, and the checkpoint has {found}; "
            "send the prompt as text, or put a chat_template.jinja into the checkpoint"
        )


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the model's own words; its text stands."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the checkpoint's chat template {name!r} is not valid Jinja, line {error.lineno}: "
            f"{error.message}; replace it by a chat_template.jinja that is"
        ) from error


def _configured_templates(config: dict[str, object]) -> dict[str, str]:
    entry = config.get("chat_template")
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {"default": entry}
    templates: dict[str, str] = {}
    for item in entry if isinstance(entry, list) else [entry]:
        match item:
            case {"name": str(name), "template": str(source)}:
                templates[name] = source
            case _:
                raise ModelError(
                    f"tokenizer_config.json: chat_template has {item!r}; want a string, or a list "
                    "of objects with `name` and `template`; mend the entry"
                )
    return templates


def _checked_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequest(f"messages={messages!r}: want a list of at least one message")
    checked: list[dict[str, object]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequest(
                f"messages[{index}]={message!r}: want an object with a `role` such as "
                '"user", and `content`'
            )
        present = {
            name: _plain(value, f"messages[{index}].{name}")
            for name, value in message.items()
            if value is not None
        }
        checked.append(_with_reasoning_names(present))
    return checked


def _with_reasoning_names(message: dict[str, object]) -> dict[str, object]:
    """Give a message's reasoning under both names that templates read."""
    for name in _REASONING_NAMES:
        if name in message:
            reasoning = message[name]
            return {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _plain(value: object, where: str) -> object:
    """Rebuild `value` out of exact JSON types, so that a template reaches no other object."""
    if value is None or isinstance(value, bool):
        return value
    for scalar in (str, int, float):
        if isinstance(value, scalar):
            return scalar(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(entry, f"{where}.{name}") for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    raise InvalidRequest(
        f"{where} is a {type(value).__name__}; want strings, numbers, booleans, lists and objects; "
        "convert it first"
    )


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 (templates pass it either way)
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    """`tojson` without Jinja's escaping of HTML characters and with the options of json.dumps."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format_string: str) -> str:
    # local time, as templates expect
    return datetime.now().strftime(format_string)
