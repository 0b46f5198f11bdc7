"""JSON files and their values, checked: a wrong one is never replaced by a default.

Each check takes the file and the key that the value stands at, and raises `ModelError` with these,
the value found and the value wanted.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeGuard

from gapless.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path

DOWNLOAD_AGAIN = "correct the file, or download the checkpoint again"


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; `{"__float__": "Infinity"}` becomes the float.

    Raises:
        ModelError: the file cannot be read, is no JSON, or its top level is no object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_decode_float)
    except FileNotFoundError as error:
        raise ModelError(
            f"{path} does not exist; want a directory with a checkpoint in Hugging Face format: "
            "check the path, or download the checkpoint again"
        ) from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}; check its permissions") from error
    except ValueError as error:  # malformed JSON, or bytes that are not UTF-8
        raise ModelError(f"{path} is no valid JSON: {error}; {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        found = type(value).__name__
        raise ModelError(f"{path} holds a {found}, want a JSON object; {DOWNLOAD_AGAIN}")
    return value


def _decode_float(value: dict[str, Any]) -> Any:
    # transformers writes infinities and NaN as {"__float__": "Infinity"}
    if set(value) != {"__float__"}:
        return value
    return float(value["__float__"])


def wrong_value(path: Path, key: str, found: object, wanted: str) -> ModelError:
    """Return the error that says which value stands at `key` of a file, and which ones may."""
    shown = "missing" if found is None else repr(found)
    return ModelError(f"{path}: {key} is {shown}, want {wanted}; {DOWNLOAD_AGAIN}")


def integer(path: Path, key: str, value: object, *, low: int) -> int:
    """Return `value`, an integer of at least `low`; booleans are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise wrong_value(path, key, value, f"an integer of at least {low}")
    return value


def number(path: Path, key: str, value: object) -> float:
    """Return `value`, a finite number."""
    if not is_number(value) or not math.isfinite(value):
        raise wrong_value(path, key, value, "a finite number")
    return float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether `value` is a number, finite or infinite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def boolean(path: Path, key: str, value: object) -> bool:
    """Return `value`, true or false."""
    if not isinstance(value, bool):
        raise wrong_value(path, key, value, "true or false")
    return value


def string(path: Path, key: str, value: object) -> str:
    """Return `value`, a string that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong_value(path, key, value, "a non-empty string")
    return value
