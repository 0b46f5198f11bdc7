"""Rotary embedding, from either style of config."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gapless.config.hf import checked
from gapless.core.specs.attention import YarnSpec
from gapless.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

# transformers fills in these shares of the head where a config gives none; all others rotate 1.0
DEFAULT_ROTARY_FACTORS = {
    "bamba": 0.5,
    "glm4_moe": 0.5,
    "qwen3_next": 0.25,
    "qwen3_5_text": 0.25,
    "qwen3_5_moe_text": 0.25,
}

# mrope with equal position rows, which text has, is plain rotary embedding
PLAIN_ROPE_TYPES = (None, "default", "mrope")
# turns within the original context, where a config of this type gives none
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0


@dataclass(frozen=True)
class RopeParameters:
    """Rotary embedding of a text model, from either style of config."""

    path: Path
    """File that says so."""
    theta: float
    rotary_factor: float
    """Share of the head that is rotated, above 0 and at most 1."""
    rope_type: str
    """"default" or "yarn": other types are refused on reading."""
    raw: Mapping[str, Any]
    """All rotary keys of the config in one mapping, nulls left out."""
    yarn: YarnSpec | None = None
    """How frequencies are stretched, with type "yarn"."""

    def number(self, key: str, default: float) -> float:
        """Return the number at `key` of the rotary keys; `default` where it is missing.

        Raises:
            ModelError: it is no finite number.
        """
        return checked.number(self.path, key, self.raw.get(key, default))


def rope_parameters(path: Path, model_type: str, values: Mapping[str, Any]) -> RopeParameters:
    """Read the rotary embedding of a model from the keys of its config.

    Raises:
        ModelError: the config gives no base frequency; class defaults are never assumed.
    """
    raw = rope_fields(path, values)
    if "rope_theta" not in raw:
        raise checked.wrong_value(path, "rope_theta", None, "a number, here or in rope_parameters")
    theta = checked.number(path, "rope_theta", raw["rope_theta"])
    default_factor = DEFAULT_ROTARY_FACTORS.get(model_type, 1.0)
    found = raw.get("partial_rotary_factor", default_factor)
    factor = checked.number(path, "partial_rotary_factor", found)
    if theta <= 0.0:
        raise checked.wrong_value(path, "rope_theta", theta, "a number above 0")
    if not 0.0 < factor <= 1.0:
        raise checked.wrong_value(path, "partial_rotary_factor", factor, "above 0 and at most 1")
    plain = RopeParameters(path, theta, factor, "default", raw)
    if not _is_yarn(raw):
        return plain
    yarn = _yarn(plain, values.get("max_position_embeddings"))
    return replace(plain, rope_type="yarn", yarn=yarn)


def rope_fields(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Merge the rotary keys of both config styles; `rope_parameters` has the last word."""
    merged: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        if values.get(key) is not None:
            merged[key] = values[key]
    for key in ("rope_scaling", "rope_parameters"):
        block = values.get(key)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise checked.wrong_value(path, key, block, "an object or null")
        _check_rope_type(path, key, block)
        if _is_yarn(merged) and not _is_yarn(block):
            raise UnsupportedModel(
                f"{path}: rope_scaling says 'yarn', {key} does not; want one of them: take the "
                "other out of the config"
            )
        merged.update({name: value for name, value in block.items() if value is not None})
    return merged


def _is_yarn(block: Mapping[str, Any]) -> bool:
    return "yarn" in (block.get("rope_type"), block.get("type"))


def _yarn(rope: RopeParameters, max_position: object) -> YarnSpec:
    """Read how frequencies are stretched, with the defaults of transformers."""
    path, key = rope.path, "original_max_position_embeddings"
    original = checked.integer(path, key, rope.raw.get(key), low=1)
    if "factor" in rope.raw:
        factor = rope.number("factor", 1.0)
    else:
        factor = checked.integer(path, "max_position_embeddings", max_position, low=1) / original
    if factor < 1.0:
        raise checked.wrong_value(path, "factor", factor, "a number of at least 1")
    scale, all_dims = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    attention = yarn_mscale(factor, 1.0)
    if scale and all_dims:
        attention = yarn_mscale(factor, scale) / yarn_mscale(factor, all_dims)
    return YarnSpec(
        factor=factor,
        original_max_position=original,
        beta_fast=rope.number("beta_fast", YARN_BETA_FAST),
        beta_slow=rope.number("beta_slow", YARN_BETA_SLOW),
        attention_factor=rope.number("attention_factor", attention),
        truncates=checked.boolean(path, "truncate", rope.raw.get("truncate", True)),
    )


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return 0.1 mscale ln(factor) + 1, by which YaRN sharpens attention over longer contexts."""
    return 0.1 * mscale * math.log(factor) + 1.0


def _check_rope_type(path: Path, key: str, block: dict[str, Any]) -> None:
    per_layer_type = sorted(name for name, value in block.items() if isinstance(value, dict))
    if per_layer_type:
        raise UnsupportedModel(
            f"{path}: {key} differs between layer types ({', '.join(per_layer_type)}); want one "
            "rotary embedding for all layers: serve another model"
        )
    for name in (block.get("rope_type"), block.get("type")):
        if name not in (*PLAIN_ROPE_TYPES, "yarn"):
            raise UnsupportedModel(
                f"{path}: rope type {name!r} in {key} is not supported, want 'default' or 'yarn': "
                "remove the scaling from the config to serve the context the model was trained for"
            )
