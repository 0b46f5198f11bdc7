"""What the GPU benchmarks do before and after they meet a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu.engine import kernel_class
from benchmarks.gpu.models import MODELS, write_checkpoint
from gapless.config.hf import read_hf_config
from gapless.models.registry import read_architecture

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_shapes_that_they_are_named_after(name: str, tmp_path: Path) -> None:
    architecture = read_architecture(read_hf_config(write_checkpoint(name, tmp_path)))
    wanted = {"35b-a3b": 34.7e9, "4b": 4.2e9, "small": 0.22e9}
    assert architecture.num_parameters == pytest.approx(wanted[name], rel=0.12)
    assert architecture.num_mtp_layers == 1


@pytest.mark.parametrize(("name", "wanted"), [
    ("_window_kernel", "attention"),
    ("_replay_window_kernel", "linear state"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "projections"),
    ("_rms_norm_kernel", "norm and conv"),
    ("void at::native::vectorized_elementwise_kernel<4>", "small kernels"),
])  # fmt: skip
def test_kernels_are_sorted_into_classes(name: str, wanted: str) -> None:
    assert kernel_class(name) == wanted
