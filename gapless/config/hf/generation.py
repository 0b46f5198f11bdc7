"""What generation_config.json says about sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapless.config.hf import checked

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling parameters; None where the file says nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def generation_defaults(path: Path, values: Mapping[str, Any]) -> GenerationDefaults:
    """Read the defaults from the keys of the file at `path`; nulls count as absent.

    Raises:
        ModelError: a value has the wrong type.
    """

    def number(key: str) -> float | None:
        found = values.get(key)
        return None if found is None else checked.number(path, key, found)

    do_sample, top_k = values.get("do_sample"), values.get("top_k")
    return GenerationDefaults(
        do_sample=None if do_sample is None else checked.boolean(path, "do_sample", do_sample),
        temperature=number("temperature"),
        top_k=None if top_k is None else checked.integer(path, "top_k", top_k, low=-1),
        top_p=number("top_p"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )
