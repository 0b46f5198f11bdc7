"""Engine options with some of them changed, from `option=value` texts."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from gapless.config.options import EngineOptions
from gapless.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence


def changed_options(options: EngineOptions, changes: Sequence[str]) -> EngineOptions:
    """Return `options` with each `option=value` of `changes` applied.

    A value is read as the option's declared type; "none" stands for no choice, where it may.

    Raises:
        ConfigError: a change is not of that form, names no option, or has a value of another type.
    """
    values: dict[str, Any] = {}
    for change in changes:
        name, equals, text = change.partition("=")
        name = name.strip().removeprefix("--").replace("-", "_")
        if not equals:
            raise ConfigError(f"{change!r}: want option=value, such as page_size=32")
        if name in values:
            raise ConfigError(f"{name} is changed twice; give one value")
        # knows the options, and which one was meant
        EngineOptions.from_dict({name: text})
        values[name] = _parse(name, text.strip(), get_type_hints(EngineOptions)[name])
    return EngineOptions.from_dict({**asdict(options), **values})


def _parse(name: str, text: str, declared: Any) -> Any:
    if get_origin(declared) is Literal:
        if text in get_args(declared):
            return text
        raise ConfigError(f"{name}={text!r}: want one of {', '.join(get_args(declared))}")
    kinds = get_args(declared) or (declared,)
    if type(None) in kinds and text.lower() == "none":
        return None
    kind = next(kind for kind in kinds if kind is not type(None))
    try:
        return kind(text)
    except ValueError as error:
        wanted = {int: "an integer", float: "a number"}[kind]
        raise ConfigError(f"{name}={text!r}: want {wanted}") from error
