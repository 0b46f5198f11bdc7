"""Messages between the process that talks to clients and the one that runs the engine.

They are msgspec's msgpack, never pickles: reading one makes these types and nothing else.
"""

from __future__ import annotations

from typing import Any

import msgspec

import gapless.errors
from gapless.core.messages import EngineStats, Submission, Update
from gapless.core.sampling_params import SamplingParams
from gapless.engine.limits import PromptLimits
from gapless.errors import GaplessError, InternalError


class Submit(msgspec.Struct, tag=True, frozen=True):
    """Queue these, all or none; answered."""

    call: int
    submissions: tuple[Submission, ...]


class Abort(msgspec.Struct, tag=True, frozen=True):
    """End what is alive of these; their last updates come as ever."""

    request_ids: tuple[str, ...]


class FlushCache(msgspec.Struct, tag=True, frozen=True):
    """Forget prefixes; answered with the number of tokens forgotten."""

    call: int


class Inspect(msgspec.Struct, tag=True, frozen=True):
    """Send statistics, with an answer."""

    call: int


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End the process."""


ToEngine = Submit | Abort | FlushCache | Inspect | Stop


class Fault(msgspec.Struct, frozen=True):
    """An error on its way to another process."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """Describe an error; one that is not of this package is an internal one."""
        if isinstance(error, GaplessError):
            return cls(type(error).__name__, str(error))
        return cls(InternalError.__name__, f"{type(error).__name__}: {error}")

    def error(self) -> GaplessError:
        """Make the error again."""
        found = vars(gapless.errors).get(self.kind, InternalError)
        error: GaplessError = found(self.message)
        return error


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The engine can serve."""

    checkpoint: str
    """Folder that holds tokenizer and chat template."""
    limits: PromptLimits
    default_params: SamplingParams
    config: dict[str, Any]
    """Every setting that the engine decided on."""


class Answer(msgspec.Struct, frozen=True):
    """What became of a call."""

    call: int
    value: int = 0
    fault: Fault | None = None


class Report(msgspec.Struct, tag=True, frozen=True):
    """News of one iteration."""

    answers: list[Answer]
    updates: list[Update]
    stats: EngineStats | None = None


class Ended(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on, or could not start; the last message."""

    fault: Fault


FromEngine = Ready | Report | Ended

encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(ToEngine).decode
decode_news = msgspec.msgpack.Decoder(FromEngine).decode
