"""The only reader of a checkpoint's config.json and generation_config.json.

Callers get checked values: every accessor raises `ModelError` with the file, the key, the value
found and the value wanted, so that no typo or missing key turns into a default.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from gapless.core.specs.attention import YarnSpec
from gapless.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

# multimodal model type -> type of its text part, for configs that leave the latter out
WRAPPER_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}

# transformers fills in these shares of the head where a config gives none; all others rotate 1.0
DEFAULT_ROTARY_FACTORS = {
    "bamba": 0.5,
    "glm4_moe": 0.5,
    "qwen3_next": 0.25,
    "qwen3_5_text": 0.25,
    "qwen3_5_moe_text": 0.25,
}

# names that older configs have for layer types
LAYER_TYPE_ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}

# mrope with equal position rows, which text has, is plain rotary embedding
PLAIN_ROPE_TYPES = (None, "default", "mrope")
# turns within the original context, where a config of this type gives none
YARN_BETA_FAST, YARN_BETA_SLOW = 32.0, 1.0

# rows and columns that share a scale in FP8 checkpoints, which are dequantised on loading
FP8_BLOCK = 128

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")

_DOWNLOAD_AGAIN = "correct the file, or download the checkpoint again"


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
        return _number(self.path, key, self.raw.get(key, default))


@dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says about sampling; None where it says nothing."""

    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class HfConfig:
    """Checked access to one checkpoint's configuration, text part and wrapper merged."""

    path: Path
    model_type: str
    """Type of the text part, such as "qwen3_5_text"."""
    wrapper_type: str | None
    """Type of the multimodal config around it, such as "qwen3_5"."""
    values: Mapping[str, Any]
    """Keys of the text part, and those of the wrapper that the text part lacks."""
    ties_embeddings: bool
    """`tie_word_embeddings`: the text part's word, else the wrapper's, else False."""
    eos_token_ids: tuple[int, ...]
    """End-of-text ids of text part, wrapper and generation_config.json, each once."""
    generation: GenerationDefaults

    def integer(self, key: str, default: int | None = None, *, low: int = 0) -> int:
        """Return the integer at `key`; `default`, if given, where it is missing or null.

        Raises:
            ModelError: it is no integer, below `low`, or missing without a default.
        """
        if self.values.get(key) is None and default is not None:
            return default
        return _integer(self.path, key, self._required(key, "an integer"), low=low)

    def optional_integer(self, key: str, *, low: int = 0) -> int | None:
        """Return the integer at `key`, or None where it is missing or null."""
        return None if self.values.get(key) is None else self.integer(key, low=low)

    def integers(self, key: str) -> tuple[int, ...]:
        """Return the list of integers, 0 or more, at `key`; empty where it is missing or null.

        Raises:
            ModelError: it is no list of such integers.
        """
        found = self.values.get(key)
        if found is None:
            return ()
        if not isinstance(found, list):
            raise _wrong(self.path, key, found, "a list of integers")
        return tuple(_integer(self.path, key, value, low=0) for value in found)

    def number(self, key: str, default: float | None = None) -> float:
        """Return the finite number at `key`; `default`, if given, where it is missing or null.

        Raises:
            ModelError: it is no number, infinite or NaN, or missing without a default.
        """
        if self.values.get(key) is None and default is not None:
            return default
        return _number(self.path, key, self._required(key, "a number"))

    def optional_number(self, key: str) -> float | None:
        """Return the finite number at `key`, or None where it is missing or null."""
        return None if self.values.get(key) is None else self.number(key)

    def numbers(self, key: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return the list of as many numbers as `default` has, or that where it is missing or null.

        Numbers may be infinite.

        Raises:
            ModelError: it is no such list.
        """
        found = self.values.get(key)
        if found is None:
            return default
        if (
            not isinstance(found, list)
            or len(found) != len(default)
            or not all(_is_number(value) for value in found)
        ):
            raise _wrong(self.path, key, found, f"a list of {len(default)} numbers")
        return tuple(float(value) for value in found)

    def string(self, key: str) -> str:
        """Return the string at `key`.

        Raises:
            ModelError: it is missing, empty or no string.
        """
        return _string(self.path, key, self._required(key, "a string"))

    def optional_string(self, key: str) -> str | None:
        """Return the string at `key`, or None where it is missing or null."""
        return None if self.values.get(key) is None else self.string(key)

    def boolean(self, key: str, *, default: bool | None = None) -> bool:
        """Return the boolean at `key`; `default`, if given, where it is missing or null.

        Raises:
            ModelError: it is no boolean, or missing without a default.
        """
        if self.values.get(key) is None and default is not None:
            return default
        return _boolean(self.path, key, self._required(key, "true or false"))

    @property
    def rope(self) -> RopeParameters:
        """Rotary embedding, unified over `rope_parameters` and the older flat keys.

        Raises:
            ModelError: the config gives no base frequency; class defaults are never assumed.
        """
        raw = _rope_fields(self.path, self.values)
        if "rope_theta" not in raw:
            raise _wrong(self.path, "rope_theta", None, "a number, here or in rope_parameters")
        theta = _number(self.path, "rope_theta", raw["rope_theta"])
        default_factor = DEFAULT_ROTARY_FACTORS.get(self.model_type, 1.0)
        found = raw.get("partial_rotary_factor", default_factor)
        factor = _number(self.path, "partial_rotary_factor", found)
        if theta <= 0.0:
            raise _wrong(self.path, "rope_theta", theta, "a number above 0")
        if not 0.0 < factor <= 1.0:
            raise _wrong(self.path, "partial_rotary_factor", factor, "above 0 and at most 1")
        plain = RopeParameters(self.path, theta, factor, "default", raw)
        if not _is_yarn(raw):
            return plain
        yarn = _yarn(plain, self.values.get("max_position_embeddings"))
        return replace(plain, rope_type="yarn", yarn=yarn)

    @property
    def has_rope(self) -> bool:
        """Whether the config gives a base frequency: some models rotate nothing, and give none."""
        return "rope_theta" in _rope_fields(self.path, self.values)

    def section(self, key: str) -> HfConfig | None:
        """Return the object at `key` as a config of its own; None where it is missing or null.

        Raises:
            ModelError: it is no object.
        """
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise _wrong(self.path, key, found, "an object or null")
        return replace(self, values=found)

    def strings(self, key: str) -> tuple[str, ...] | None:
        """Return the list of strings at `key`, or None where it is missing or null.

        Raises:
            ModelError: it is no list of strings.
        """
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, list) or not all(isinstance(value, str) for value in found):
            raise _wrong(self.path, key, found, "a list of strings")
        return tuple(found)

    def layer_types(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return one type per layer, such as "linear_attention" or "full_attention".

        Taken from `layer_types`, else `layers_block_type`, else from `full_attention_interval`,
        else all full attention.

        Raises:
            ModelError: the list does not have `num_hidden_layers` strings.
            UnsupportedModel: a type is not in `known`, or layers have sliding windows.
        """
        found = self._layer_types()
        unknown = sorted(set(found) - set(known))
        if unknown:
            raise UnsupportedModel(
                f"{self.path}: layer_types has {', '.join(unknown)}; want {', '.join(known)}: "
                f"this kind of {self.model_type} is not supported, serve another model"
            )
        return found

    @property
    def max_position_embeddings(self) -> int:
        """Tokens of context that the model was trained for."""
        return self.integer("max_position_embeddings", low=1)

    @property
    def dtype(self) -> str | None:
        """Type of the stored weights by `dtype` or the older `torch_dtype`; None if neither."""
        for key in ("dtype", "torch_dtype"):
            name = self.optional_string(key)
            if name is not None:
                name = name.removeprefix("torch.")
                if name not in DTYPE_NAMES:
                    raise _wrong(self.path, key, name, f"one of {', '.join(DTYPE_NAMES)}")
                return name
        return None

    def _layer_types(self) -> tuple[str, ...]:
        num_layers = self.integer("num_hidden_layers", low=1)
        key = "layer_types" if self.values.get("layer_types") is not None else "layers_block_type"
        named = self.values.get(key)
        if named is not None:
            if (
                not isinstance(named, list)
                or len(named) != num_layers
                or not all(isinstance(name, str) for name in named)
            ):
                wanted = f"a list of {num_layers} strings, as num_hidden_layers says"
                raise _wrong(self.path, key, named, wanted)
            names: list[str] = named
            return tuple(LAYER_TYPE_ALIASES.get(name, name) for name in names)
        interval = self.optional_integer("full_attention_interval", low=1)
        if interval is not None:
            return tuple(
                "linear_attention" if (i + 1) % interval else "full_attention"
                for i in range(num_layers)
            )
        if self.boolean("use_sliding_window", default=False):
            raise UnsupportedModel(
                f"{self.path}: use_sliding_window is true; only full attention is supported: set "
                "it to false if contexts stay within the window"
            )
        return ("full_attention",) * num_layers

    def _required(self, key: str, wanted: str) -> Any:
        value = self.values.get(key)
        if value is None:
            raise _wrong(self.path, key, value, wanted)
        return value


def read_hf_config(directory_or_file: Path) -> HfConfig:
    """Read a checkpoint's config.json and, beside it, generation_config.json where there is one.

    Raises:
        ModelError: a file is missing or no JSON object, or a value has the wrong type.
        UnsupportedModel: quantised weights, a rotary type other than the default, or an unknown
            multimodal wrapper.
    """
    path = directory_or_file
    if path.suffix != ".json" or path.is_dir():
        path = path / CONFIG_FILE
    top = read_json_object(path)
    generation_path = path.with_name(GENERATION_FILE)
    generation = read_json_object(generation_path) if generation_path.is_file() else {}
    model_type, wrapper_type, text = _text_part(path, top)
    values = {**top, **text}
    _refuse_quantization(path, (text, top))
    _rope_fields(path, values)
    return HfConfig(
        path=path,
        model_type=model_type,
        wrapper_type=wrapper_type,
        values=values,
        ties_embeddings=_ties_embeddings(path, (text, top)),
        eos_token_ids=_eos_token_ids(((path, text), (path, top), (generation_path, generation))),
        generation=_generation_defaults(generation_path, generation),
    )


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
        raise ModelError(f"{path} is no valid JSON: {error}; {_DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        found = type(value).__name__
        raise ModelError(f"{path} holds a {found}, want a JSON object; {_DOWNLOAD_AGAIN}")
    return value


def _decode_float(value: dict[str, Any]) -> Any:
    # transformers writes infinities and NaN as {"__float__": "Infinity"}
    if set(value) != {"__float__"}:
        return value
    return float(value["__float__"])


def _text_part(path: Path, top: dict[str, Any]) -> tuple[str, str | None, dict[str, Any]]:
    """Return the text model's type, the wrapper's type, and the text part's own keys."""
    top_type = _string(path, "model_type", top.get("model_type"))
    text = top.pop("text_config", None)
    if text is None:
        if top_type in WRAPPER_TYPES:
            return WRAPPER_TYPES[top_type], top_type, {}
        return top_type, None, {}
    if not isinstance(text, dict):
        raise _wrong(path, "text_config", text, "an object")
    if top_type not in WRAPPER_TYPES:
        raise UnsupportedModel(
            f"{path}: model_type {top_type!r} wraps a text model in text_config; want one of "
            f"{', '.join(WRAPPER_TYPES)}: serve a text-only checkpoint of the model"
        )
    text_type = text.get("model_type", WRAPPER_TYPES[top_type])
    return _string(path, "text_config.model_type", text_type), top_type, text


def _refuse_quantization(path: Path, parts: tuple[dict[str, Any], ...]) -> None:
    method: object = None
    for part in parts:
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if found is not None and not (key == "quantization_config" and _is_block_fp8(found)):
                method = found.get("quant_method") if isinstance(found, dict) else found
                raise _quantized(path, key, method)
    # ModelOpt exports say it in a file of its own, and config.json may be silent
    separate = path.with_name("hf_quant_config.json")
    if separate.is_file():
        found = read_json_object(separate).get("quantization")
        method = found.get("quant_algo") if isinstance(found, dict) else found
        raise _quantized(separate, "quantization", method)


def _is_block_fp8(found: object) -> bool:
    """Whether weights are stored as `models/loader.py` dequantises them."""
    return isinstance(found, dict) and (
        found.get("quant_method"), found.get("fmt", "e4m3"), found.get("weight_block_size")
    ) == ("fp8", "e4m3", [FP8_BLOCK, FP8_BLOCK])  # fmt: skip


def _quantized(path: Path, key: str, method: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"{path}: {key} says that the weights are quantised with {method!r}; want unquantised "
        "weights: serve the bfloat16 or float32 checkpoint of this model"
    )


def _rope_fields(path: Path, values: Mapping[str, Any]) -> dict[str, Any]:
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
            raise _wrong(path, key, block, "an object or null")
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
    original = _integer(path, key, rope.raw.get(key), low=1)
    if "factor" in rope.raw:
        factor = rope.number("factor", 1.0)
    else:
        factor = _integer(path, "max_position_embeddings", max_position, low=1) / original
    if factor < 1.0:
        raise _wrong(path, "factor", factor, "a number of at least 1")
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
        truncates=_boolean(path, "truncate", rope.raw.get("truncate", True)),
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


def _ties_embeddings(path: Path, parts: tuple[dict[str, Any], ...]) -> bool:
    for part in parts:
        found = part.get("tie_word_embeddings")
        if found is not None:
            return _boolean(path, "tie_word_embeddings", found)
    return False


def _eos_token_ids(parts: tuple[tuple[Path, dict[str, Any]], ...]) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for path, part in parts:
        found = part.get("eos_token_id")
        for token_id in found if isinstance(found, list) else [found]:
            if token_id is not None:
                ids[_integer(path, "eos_token_id", token_id, low=0)] = None
    return tuple(ids)


def _generation_defaults(path: Path, values: dict[str, Any]) -> GenerationDefaults:
    given = {key: value for key, value in values.items() if value is not None}

    def number(key: str) -> float | None:
        return _number(path, key, given[key]) if key in given else None

    return GenerationDefaults(
        do_sample=_boolean(path, "do_sample", given["do_sample"]) if "do_sample" in given else None,
        temperature=number("temperature"),
        top_k=_integer(path, "top_k", given["top_k"], low=-1) if "top_k" in given else None,
        top_p=number("top_p"),
        min_p=number("min_p"),
        repetition_penalty=number("repetition_penalty"),
    )


def _wrong(path: Path, key: str, found: object, wanted: str) -> ModelError:
    shown = "missing" if found is None else repr(found)
    return ModelError(f"{path}: {key} is {shown}, want {wanted}; {_DOWNLOAD_AGAIN}")


def _integer(path: Path, key: str, value: object, *, low: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise _wrong(path, key, value, f"an integer of at least {low}")
    return value


def _number(path: Path, key: str, value: object) -> float:
    if not _is_number(value) or not math.isfinite(value):
        raise _wrong(path, key, value, "a finite number")
    return float(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def _boolean(path: Path, key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(path, key, value, "true or false")
    return value


def _string(path: Path, key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise _wrong(path, key, value, "a non-empty string")
    return value
