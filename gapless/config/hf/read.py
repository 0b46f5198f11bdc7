"""A checkpoint's config.json and generation_config.json, read and merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.config.hf import checked
from gapless.config.hf.config import HfConfig
from gapless.config.hf.generation import generation_defaults
from gapless.config.hf.quantization import refuse_quantization
from gapless.config.hf.rope import rope_fields
from gapless.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# multimodal model type -> type of its text part, for configs that leave the latter out
WRAPPER_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}


def read_hf_config(directory_or_file: Path) -> HfConfig:
    """Read a checkpoint's config.json and, beside it, generation_config.json where there is one.

    Raises:
        ModelError: a file is missing or no JSON object, or a value has the wrong type.
        UnsupportedModel: quantised weights, a rotary type other than plain and YaRN, or an unknown
            multimodal wrapper.
    """
    path = directory_or_file
    if path.suffix != ".json" or path.is_dir():
        path = path / CONFIG_FILE
    top = checked.read_json_object(path)
    generation_path = path.with_name(GENERATION_FILE)
    generation = checked.read_json_object(generation_path) if generation_path.is_file() else {}
    model_type, wrapper_type, text = _text_part(path, top)
    values = {**top, **text}
    refuse_quantization(path, (text, top))
    rope_fields(path, values)  # a type that is not supported is refused here, not in a model
    return HfConfig(
        path=path,
        model_type=model_type,
        wrapper_type=wrapper_type,
        values=values,
        ties_embeddings=_ties_embeddings(path, (text, top)),
        eos_token_ids=_eos_token_ids(((path, text), (path, top), (generation_path, generation))),
        generation=generation_defaults(generation_path, generation),
    )


def _text_part(path: Path, top: dict[str, Any]) -> tuple[str, str | None, dict[str, Any]]:
    """Return the text model's type, the wrapper's type, and the text part's own keys."""
    top_type = checked.string(path, "model_type", top.get("model_type"))
    text = top.pop("text_config", None)
    if text is None:
        if top_type in WRAPPER_TYPES:
            return WRAPPER_TYPES[top_type], top_type, {}
        return top_type, None, {}
    if not isinstance(text, dict):
        raise checked.wrong_value(path, "text_config", text, "an object")
    if top_type not in WRAPPER_TYPES:
        raise UnsupportedModel(
            f"{path}: model_type {top_type!r} wraps a text model in text_config; want one of "
            f"{', '.join(WRAPPER_TYPES)}: serve a text-only checkpoint of the model"
        )
    text_type = text.get("model_type", WRAPPER_TYPES[top_type])
    return checked.string(path, "text_config.model_type", text_type), top_type, text


def _ties_embeddings(path: Path, parts: tuple[dict[str, Any], ...]) -> bool:
    for part in parts:
        found = part.get("tie_word_embeddings")
        if found is not None:
            return checked.boolean(path, "tie_word_embeddings", found)
    return False


def _eos_token_ids(parts: tuple[tuple[Path, dict[str, Any]], ...]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for path, part in parts:
        found = part.get("eos_token_id")
        for token_id in found if isinstance(found, list) else [found]:
            if token_id is not None:
                ids[checked.integer(path, "eos_token_id", token_id, low=0)] = None
    return tuple(ids)
