"""What the GPU benchmarks do before and after they meet a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from benchmarks.gpu.engine import idle_shares, kernel_class
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
    ("_combine_kernel", "moe"),
    ("_window_combine_kernel", "attention"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "projections"),
    ("void at::native::vectorized_elementwise_kernel<4>", "small kernels"),
])  # fmt: skip
def test_kernels_are_sorted_into_classes(name: str, wanted: str) -> None:
    assert kernel_class(name) == wanted


def test_idle_time_is_divided_into_seams_and_gaps() -> None:
    kernels = [
        ("Memcpy HtoD", 0.0, 1.0), ("a", 2.0, 4.0), ("b", 5.0, 9.0), ("Memcpy DtoH", 9.0, 10.0),
        ("Memcpy HtoD", 11.0, 12.0), ("a", 12.0, 14.0), ("b", 13.0, 20.0),
    ]  # fmt: skip
    assert idle_shares(kernels) == {"seam_share": 0.3, "gap_share": 0.1}
