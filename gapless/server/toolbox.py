"""The functions that a request offers to the model, and whether it may call them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gapless.core.grammar import Grammar
from gapless.server.errors import ApiError, wrong

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_NAME = re.compile(r"[A-Za-z0-9_./:-]{1,128}")
_CHAT_FORM = '{"type": "function", "function": {"name": ..., "parameters": ...}}'


@dataclass(frozen=True)
class Toolset:
    """What the model is told of."""

    functions: tuple[Mapping[str, Any], ...] = ()
    """Each with `name`, and perhaps `description` and `parameters`, a JSON schema."""
    is_single: bool = False
    """Whether an answer may hold one call only."""
    grammar: Grammar | None = None
    """Where a call is forced: what admits exactly one, as `{"name": ..., "arguments": ...}`."""

    def for_template(self) -> list[dict[str, Any]] | None:
        """Return the list that chat templates want; None where there is no function."""
        if not self.functions:
            return None
        return [{"type": "function", "function": dict(function)} for function in self.functions]


def chat_tools(tools: Sequence[Any], choice: Any, *, is_single: bool) -> Toolset:
    """Read `tools` and `tool_choice` as chats have them.

    Raises:
        ApiError: one is malformed, or asks for what is not there.
    """
    functions = []
    for index, tool in enumerate(tools):
        match tool:
            case {"type": "function", "function": dict(function)}:
                functions.append(checked_function(f"tools[{index}].function", function))
            case _:
                raise _refusal("tools", f"tools[{index}]={_shown(tool)}", f"want {_CHAT_FORM}")
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            choice = {"name": name}
    return chosen(functions, choice, is_single=is_single)


def chosen(functions: Sequence[Mapping[str, Any]], choice: Any, *, is_single: bool) -> Toolset:
    """Apply a choice: `auto` or nothing, `none`, `required`, or an object with a `name`.

    Raises:
        ApiError: it is none of these, or there is no such function to call.
    """
    match choice:
        case None | "auto":
            return Toolset(tuple(functions), is_single)
        case "none":
            return Toolset()
        case "required":
            wanted = list(functions)
        case {"name": name}:
            wanted = [function for function in functions if function["name"] == name]
        case _:
            raise _refusal(
                "tool_choice", f"tool_choice={_shown(choice)}", "send 'auto', 'required' or 'none'"
            )
    if not wanted:
        raise wrong("tool_choice", f"is {_shown(choice)}; want one of the tools that are given")
    return Toolset(tuple(functions), is_single=True, grammar=_one_call(wanted))


def _one_call(functions: Sequence[Mapping[str, Any]]) -> Grammar:
    """Return the grammar of one call of one of `functions`."""
    shared: dict[str, dict[str, Any]] = {}
    calls = []
    for function in functions:
        schema = {"type": "object", **function.get("parameters", {})}
        for place in ("$defs", "definitions"):
            definitions = schema.pop(place, {})
            if not isinstance(definitions, dict):
                raise wrong("tools", f"have {place} that are no object; want a JSON schema")
            # references begin at the root, so what they name has to stand there
            for name, definition in definitions.items():
                known = shared.setdefault(place, {}).setdefault(name, definition)
                if known != definition:
                    raise wrong("tools", f"define {place}/{name} in two ways; rename one")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "arguments": schema},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    try:
        return Grammar.json_schema({"anyOf": calls, **shared})
    except RecursionError as error:
        raise wrong("tools", "nest too deeply; flatten them") from error


def checked_function(where: str, function: Mapping[str, Any]) -> dict[str, Any]:
    """Return what templates may know of a function.

    Raises:
        ApiError: an entry is malformed.
    """
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(
            f"{where}.name", f"is {_shown(name)}; want 1 to 128 letters, digits or any of _./:-"
        )
    found: dict[str, Any] = {"name": name}
    for entry, kind, wanted in (
        ("description", str, "text"),
        ("parameters", dict, "a JSON schema, which is an object"),
    ):
        value = function.get(entry)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise wrong(f"{where}.{entry}", f"is a {type(value).__name__}; want {wanted}")
        found[entry] = value
    return found


def past_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Return the calls of an earlier answer as chat templates want them: arguments as an object.

    Raises:
        ApiError: they are malformed.
    """
    if not isinstance(calls, list):
        raise wrong(where, f"is a {type(calls).__name__}; want a list")
    return [_past_call(f"{where}[{index}]", call) for index, call in enumerate(calls)]


def _past_call(where: str, call: Any) -> dict[str, Any]:
    match call:
        case {"function": {"name": str(name), **rest}}:
            arguments = rest.get("arguments", {})
        case _:
            raise wrong(where, 'is malformed; want {"function": {"name": ..., "arguments": ...}}')
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        # what the model wrote is told to it as it was, even where it is no object
        arguments = parsed if isinstance(parsed, dict) else arguments
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**kept, "type": "function", "function": {"name": name, "arguments": arguments}}


def _refusal(param: str, found: str, remedy: str) -> ApiError:
    return ApiError(
        HTTPStatus.BAD_REQUEST,
        f"{found} is not supported; {remedy}",
        param=param,
        code="unsupported_parameter",
    )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
