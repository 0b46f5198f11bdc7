"""Models whose checkpoints spell the usual names in their own way."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from gapless.models.decoder import Decoder

if TYPE_CHECKING:
    from gapless.core.architecture import Architecture
    from gapless.layers.placement import Placement
    from gapless.layers.shard import Target

Spelling = Sequence[tuple[str, str]]
"""Regular expressions and what the part of a usual name that one finds is replaced by, in order."""


def spell(name: str, spelling: Spelling) -> str:
    """Spell a usual name as a family does."""
    for pattern, replacement in spelling:
        name = re.sub(pattern, replacement, name)
    return name


class StoredNames(Collection[str]):
    """Names that the files hold, asked for by usual names."""

    def __init__(self, stored_names: Collection[str], spelling: Spelling) -> None:
        self._stored_names, self._spelling = stored_names, spelling

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and spell(name, self._spelling) in self._stored_names

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored_names)

    def __len__(self) -> int:
        return len(self._stored_names)


class SpelledDecoder(Decoder):
    """A decoder with another spelling in its checkpoints."""

    def __init__(
        self, spec: Architecture, place: Placement, spelling: Spelling, *, num_positions: int
    ) -> None:
        super().__init__(spec, place, num_positions=num_positions, is_zero_centred=False)
        self._spelling = spelling

    def targets(self, stored_names: Collection[str]) -> dict[str, Target]:
        """See `Decoder.targets`."""
        found = super().targets(StoredNames(stored_names, self._spelling))
        return {spell(name, self._spelling): target for name, target in found.items()}
