"""What a request's text must follow: the grammar asked for, and the seam that gives its masks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from gapless.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

# longer ones would travel and compile for too long
MAX_SOURCE_CHARS = 1 << 17


class GrammarKind(StrEnum):
    """What a grammar's source is written in."""

    JSON_OBJECT = "json_object"  # no source: any JSON object
    JSON_SCHEMA = "json_schema"  # JSON
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of texts


@dataclass(frozen=True)
class Grammar:
    """A language that the whole output must be a text of.

    Raises:
        InvalidRequest: the source is too long, or a choice is none.
    """

    kind: GrammarKind
    source: str = ""

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE_CHARS:
            raise InvalidRequest(
                f"the {self.kind} has {len(self.source)} characters; want at most "
                f"{MAX_SOURCE_CHARS}: simplify it"
            )

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls(GrammarKind.JSON_OBJECT)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """JSON that a schema, given as an object or as its text, admits.

        Raises:
            InvalidRequest: the object nests too deeply to be written.
        """
        if isinstance(schema, str):
            return cls(GrammarKind.JSON_SCHEMA, schema)
        try:
            return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False))
        except RecursionError as error:
            raise InvalidRequest("the json_schema nests too deeply; flatten it") from error

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """A text that a regular expression matches as a whole."""
        return cls(GrammarKind.REGEX, pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """One of several texts.

        Raises:
            InvalidRequest: there is none, or one is empty or no text.
        """
        if not texts or any(not isinstance(text, str) or not text for text in texts):
            raise InvalidRequest(f"choice={list(texts)!r}: want at least one text, none empty")
        return cls(GrammarKind.CHOICE, json.dumps(list(texts), ensure_ascii=False))


class GrammarState(Protocol):
    """How far one request's output has come in its grammar."""

    def fill(
        self,
        output_ids: Sequence[int],
        drafts: Sequence[int],
        masks: np.ndarray,
        parents: Sequence[int] | None = None,
    ) -> None:
        """Write which tokens may follow the output, and it with the drafts that lead to each.

        Args:
            output_ids: all tokens of output; those of the last call begin them.
            drafts: proposals after them; the masks of those that the grammar refuses, and of all
                that come after such a one, are left as they are.
            masks: [1 + len(drafts) or more, ceil(V / 32)] int32, contiguous: that of the output,
                then one for each draft; bit `t % 32` of word `t // 32` says whether token `t` may
                stand there.
            parents: of each draft, which of the masks is that of the token before it; an earlier
                one. None: each follows the one before.
        """
        ...
