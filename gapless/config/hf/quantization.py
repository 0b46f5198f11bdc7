"""Which forms of quantised weights can be loaded; all others are refused on reading a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gapless.config.hf.checked import read_json_object
from gapless.errors import UnsupportedModel

if TYPE_CHECKING:
    from pathlib import Path

# rows and columns that share a scale in FP8 checkpoints, which are dequantised on loading
FP8_BLOCK = 128


def refuse_quantization(path: Path, parts: tuple[dict[str, Any], ...]) -> None:
    """Refuse weights that are quantised in another way than FP8 with block scales.

    `parts` are the objects of the config at `path` that may say so, the first to be asked first.

    Raises:
        UnsupportedModel: one of them says so, or ModelOpt's file beside `path` does.
    """
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
