"""Prompts of requests to token ids, checked against what the model accepts.

Reading a prompt may take long, so `PromptReader`'s methods run in threads: the event loop goes on.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapless.errors import ConfigError, ModelError
from gapless.server.errors import wrong
from gapless.server.toolbox import past_calls
from gapless.text.chat import ChatTemplate, EncodedPrompt
from gapless.text.reasoning import CLOSE
from gapless.text.tokenizer import Tokenizer, read_tokenizer_config
from gapless.text.tools import style_of_template

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gapless.engine.wire import Ready
    from gapless.text.tools import ToolStyle

# variables that a template has from the request itself
_RESERVED = ("messages", "add_generation_prompt", "tools", "documents")


class PromptReader:
    """The text side of a model."""

    tool_style: ToolStyle | None
    """How the model writes tool calls; None where its template teaches no known way."""
    has_reasoning: bool
    """Whether its template knows of thoughts."""

    def __init__(
        self, ready: Ready, chat_template: str | None, tool_style: ToolStyle | None = None
    ) -> None:
        """Load tokenizer and chat template.

        `chat_template` is Jinja in place of the checkpoint's, `tool_style` a style in place of
        the one that the template teaches.

        Raises:
            ModelError: a file is missing or malformed.
        """
        checkpoint = Path(ready.checkpoint)
        self.limits = ready.limits
        self.tokenizer = Tokenizer(checkpoint)
        if chat_template is None:
            self._template = ChatTemplate.from_checkpoint(checkpoint, self.tokenizer)
        else:
            special = self.tokenizer.special_tokens
            self._template = ChatTemplate({"default": chat_template}, special)
        source = _source(checkpoint) if chat_template is None else chat_template
        self.tool_style = tool_style or style_of_template(source)
        self.has_reasoning = CLOSE in source

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> EncodedPrompt:
        """Encode a chat; `tools` are those of OpenAI's chats.

        Raises:
            ApiError: the messages are malformed, or a variable's name is taken.
            InvalidRequest: the template refuses them.
        """
        for name in _RESERVED:
            if name in variables:
                raise wrong(f"chat_template_kwargs.{name}", "is no variable; leave it out")
        plain = [_message(index, message) for index, message in enumerate(messages)]
        try:
            return self._template.encode(
                self.tokenizer,
                plain,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                **variables,
            )
        except RecursionError as error:
            raise wrong("messages", "nest too deeply; flatten them") from error

    def texts(self, prompt: str | list[str | int | list[int]]) -> list[EncodedPrompt]:
        """Encode a completion's prompt, which is one or several of text or token ids.

        Raises:
            ApiError: it mixes kinds, or has nothing.
        """
        if isinstance(prompt, str):
            return [self._text(prompt)]
        if not prompt:
            raise wrong("prompt", "is empty; want text or token ids")
        ids = [item for item in prompt if isinstance(item, int)]
        if ids:
            if len(ids) < len(prompt):
                raise wrong("prompt", "mixes token ids with other things; want one kind")
            return [EncodedPrompt(ids)]
        if len({type(item) for item in prompt}) > 1:
            raise wrong("prompt", "mixes text and token ids; want one kind")
        return [
            self._text(item) if isinstance(item, str) else EncodedPrompt(item)
            for item in prompt
            if not isinstance(item, int)
        ]

    def _text(self, text: str) -> EncodedPrompt:
        return EncodedPrompt(self.tokenizer.encode(text, add_special_tokens=True))


def _source(checkpoint: Path) -> str:
    """Return the text of a checkpoint's chat templates."""
    file = checkpoint / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return str(read_tokenizer_config(checkpoint).get("chat_template", ""))


def read_template(given: str | None) -> str | None:
    """Return the source of a chat template that is given as a file or as itself.

    Raises:
        ConfigError: it is neither, or no Jinja.
    """
    if given is None:
        return None
    source = given
    # a template without any braces would say the same to every chat
    if "{" not in given:
        try:
            source = Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"chat_template={given!r} cannot be read: {error}; want a file with a Jinja "
                "template, or the template itself"
            ) from error
    try:
        ChatTemplate({"default": source}, {})
    except ModelError as error:
        raise ConfigError(f"chat_template: {error.__cause__}; correct it") from error
    return source


def _message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its content as text."""
    where = f"messages[{index}]"
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise wrong(f"{where}.role", f"is {role!r}; want a text such as 'user'")
    plain = {name: value for name, value in message.items() if value is not None}
    # the newer name, which templates do not know
    if role == "developer":
        plain["role"] = "system"
    content = plain.get("content")
    if content is not None:
        plain["content"] = text_of(f"{where}.content", content)
    elif plain.get("tool_calls"):
        plain["content"] = ""
    else:
        raise wrong(f"{where}.content", "is missing; want text")
    if "tool_calls" in plain:
        plain["tool_calls"] = past_calls(f"{where}.tool_calls", plain["tool_calls"])
    return plain


def text_of(where: str, content: object) -> str:
    """Return the content of a message as text.

    Raises:
        ApiError: it is neither text nor a list of parts that are.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, f"is a {type(content).__name__}; want text")
    return "\n".join(part_text(f"{where}[{i}]", part) for i, part in enumerate(content))


def part_text(where: str, part: object) -> str:
    """Return the text of a piece of content; nothing is ever fetched for one."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise wrong(where, f"is of type {kind!r}; this model reads text only")
    raise wrong(where, 'is malformed; want {"type": "text", "text": "..."}')
