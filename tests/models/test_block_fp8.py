"""Weights stored in FP8 with a scale per block are those that the scales say."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from gapless.config.hf import read_hf_config
from gapless.errors import UnsupportedModel, WeightMismatch
from gapless.layers.shard import Shard, Share
from gapless.models.loader import load_weights
from tests.models import tiny
from tests.models.comparison import token_ids
from tests.models.driver import TeacherForced

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise a matrix by blocks of 128 x 128; return it and its scales."""
    rows, columns = (-(-size // 128) for size in weight.shape)
    scales = torch.empty(rows, columns)
    found = torch.empty_like(weight)
    for row in range(rows):
        for column in range(columns):
            at = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
            scales[row, column] = weight[at].abs().max() / 448
            found[at] = weight[at] / scales[row, column]
    return found.to(torch.float8_e4m3fn), scales


def dequantised(weight: Tensor, scales: Tensor) -> Tensor:
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
    return weight.float() * spread[: weight.shape[0], : weight.shape[1]]


@pytest.fixture
def stored(tmp_path: Path) -> tuple[list[Path], Tensor]:
    """A matrix whose last blocks are cut, its scales in another file; what it stands for."""
    generator = torch.Generator().manual_seed(3)
    weight, scales = quantised(torch.randn(300, 200, generator=generator))
    files = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    save_file({"x.weight": weight}, files[1])
    save_file({"x.weight_scale_inv": scales}, files[0])
    return files, dequantised(weight, scales)


def load(files: list[Path], target: Any) -> None:
    load_weights(files, {"x.weight": target}, canonical=str, ignore=[])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_matrix_is_dequantised_and_noted(
    stored: tuple[list[Path], Tensor], dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    files, expected = stored
    found = torch.full((300, 200), torch.nan, dtype=dtype)
    with caplog.at_level(logging.INFO):
        load(files, found)
    assert torch.equal(found, expected.to(dtype))
    assert "1 tensors are stored in FP8 with a scale per block of 128 x 128" in caplog.text


@pytest.mark.parametrize(
    ("dim", "ranges"), [(0, ((100, 90), (250, 50))), (1, ((64, 100),)), (0, ((0, 300),))]
)
def test_a_share_begins_inside_of_blocks(
    stored: tuple[list[Path], Tensor], dim: int, ranges: tuple[tuple[int, int], ...]
) -> None:
    files, expected = stored
    share = Share(expected.shape[dim], ranges)
    shape = list(expected.shape)
    shape[dim] = share.length
    held = torch.full(shape, torch.nan)
    load(files, Shard(held, dim, share))
    parts = [expected.narrow(dim, start, length) for start, length in ranges]
    assert torch.equal(held, torch.cat(parts, dim))


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"x.weight_scale_inv": None}, UnsupportedModel, r"x\.weight F8_E4M3 .*unquantised"),
        ({"x.weight_scale_inv": torch.ones(3, 3)}, WeightMismatch,
         r"1 misshapen: x\.weight_scale_inv F32 \[3, 3\] in .*, want \[3, 2\]"),
        ({"x.weight": torch.ones(300, 200)}, WeightMismatch, r"1 unexpected: x\.weight_scale_inv"),
        ({"x.weight": None}, WeightMismatch, r"1 missing: x\.weight"),
        ({"y.weight_scale_inv": torch.ones(1, 1)}, WeightMismatch, "1 unexpected: y"),
    ],
)  # fmt: skip
def test_scales_belong_to_weights(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    weight, scales = quantised(torch.randn(300, 200))
    parts = {"x.weight": weight, "x.weight_scale_inv": scales} | changes
    save_file({k: v for k, v in parts.items() if v is not None}, tmp_path / "x.safetensors")
    with pytest.raises(error, match=words):
        load([tmp_path / "x.safetensors"], torch.zeros(300, 200))


@pytest.mark.parametrize(
    "changes",
    [{"weight_block_size": [64, 128]}, {"weight_block_size": None}, {"fmt": "e5m2"},
     {"quant_method": "awq"}],
)  # fmt: skip
def test_other_quantisation_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = {"model_type": "deepseek_v3", "quantization_config": BLOCKS | changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="quantization_config says that the weights are"):
        read_hf_config(tmp_path)


def test_a_quantised_model_is_the_one_that_its_scales_stand_for(
    checkpoint_of: Callable[[str, bool], Path], tmp_path: Path
) -> None:
    source = checkpoint_of("deepseek_v3", True)
    config = json.loads((source / "config.json").read_text())
    packed: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, weight in tiny.stored_weights(source).items():
        plain[name] = packed[name] = weight
        if name.endswith("_proj.weight"):
            packed[name], packed[f"{name}_scale_inv"] = quantised(weight)
            plain[name] = dequantised(packed[name], packed[f"{name}_scale_inv"])
    logits = []
    for kind, weights in (("packed", packed), ("plain", plain)):
        directory = tmp_path / kind
        tiny.save_sharded(weights, directory, 3)
        extra = {"quantization_config": BLOCKS} if kind == "packed" else {}
        (directory / "config.json").write_text(json.dumps(config | extra))
        forced = TeacherForced(directory, dtype="float64")
        forced.prefill((0, token_ids()[0][:20], 0))
        logits.append(forced.all_logits(0))
    assert torch.equal(*logits)
    assert len(packed) > len(plain) > 0
