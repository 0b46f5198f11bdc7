"""Checked access to what a checkpoint's config.json says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gapless.config.hf import checked
from gapless.config.hf.rope import rope_fields, rope_parameters
from gapless.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from gapless.config.hf.generation import GenerationDefaults
    from gapless.config.hf.rope import RopeParameters

# names that older configs have for layer types
LAYER_TYPE_ALIASES = {"mamba": "linear_attention", "attention": "full_attention"}

DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")


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
        return checked.integer(self.path, key, self._required(key, "an integer"), low=low)

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
            raise checked.wrong_value(self.path, key, found, "a list of integers")
        return tuple(checked.integer(self.path, key, value, low=0) for value in found)

    def number(self, key: str, default: float | None = None) -> float:
        """Return the finite number at `key`; `default`, if given, where it is missing or null.

        Raises:
            ModelError: it is no number, infinite or NaN, or missing without a default.
        """
        if self.values.get(key) is None and default is not None:
            return default
        return checked.number(self.path, key, self._required(key, "a number"))

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
            or not all(checked.is_number(value) for value in found)
        ):
            raise checked.wrong_value(self.path, key, found, f"a list of {len(default)} numbers")
        return tuple(float(value) for value in found)

    def string(self, key: str) -> str:
        """Return the string at `key`.

        Raises:
            ModelError: it is missing, empty or no string.
        """
        return checked.string(self.path, key, self._required(key, "a string"))

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
        return checked.boolean(self.path, key, self._required(key, "true or false"))

    @property
    def rope(self) -> RopeParameters:
        """Rotary embedding, unified over `rope_parameters` and the older flat keys.

        Raises:
            ModelError: the config gives no base frequency; class defaults are never assumed.
        """
        return rope_parameters(self.path, self.model_type, self.values)

    @property
    def has_rope(self) -> bool:
        """Whether the config gives a base frequency: some models rotate nothing, and give none."""
        return "rope_theta" in rope_fields(self.path, self.values)

    def section(self, key: str) -> HfConfig | None:
        """Return the object at `key` as a config of its own; None where it is missing or null.

        Raises:
            ModelError: it is no object.
        """
        found = self.values.get(key)
        if found is None:
            return None
        if not isinstance(found, dict):
            raise checked.wrong_value(self.path, key, found, "an object or null")
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
            raise checked.wrong_value(self.path, key, found, "a list of strings")
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
                    raise checked.wrong_value(
                        self.path, key, name, f"one of {', '.join(DTYPE_NAMES)}"
                    )
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
                raise checked.wrong_value(self.path, key, named, wanted)
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
            raise checked.wrong_value(self.path, key, value, wanted)
        return value
