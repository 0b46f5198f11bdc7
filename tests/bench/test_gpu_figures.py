"""What the GPU benchmarks do before and after they meet a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import gapless.ops
from benchmarks.gpu import harness
from benchmarks.gpu.engine import HOST_STEPS, idle_shares, kernel_class, time_host
from benchmarks.gpu.models import MODELS, write_checkpoint
from benchmarks.gpu.prefill import in_turn, largest_differences
from benchmarks.gpu.run import speedups
from gapless.config.hf import read_hf_config
from gapless.core.counters import LoopCounters
from gapless.models.registry import read_architecture


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_shapes_that_they_are_named_after(name: str, tmp_path: Path) -> None:
    architecture = read_architecture(read_hf_config(write_checkpoint(name, tmp_path)))
    wanted = {
        "35b-a3b": 34.7e9, "80b-a3b": 79.7e9, "4b": 4.2e9, "small": 0.22e9,
        "v2-lite-mtp": 15.7e9, "small-latent": 0.056e9,
    }  # fmt: skip
    assert architecture.num_parameters == pytest.approx(wanted[name], rel=0.12)
    assert architecture.num_mtp_layers == 1


@pytest.mark.parametrize(("name", "wanted"), [
    ("_window_kernel", "attention"),
    ("_window_stream_kernel", "linear state"),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "projections"),
    ("_rms_norm_kernel", "norm and conv"),
    ("_combine_kernel", "moe"),
    ("_peer_sum_kernel", "communication"),
    ("_peer_gather_kernel", "communication"),
    ("_shard_best_kernel", "sampling"),
    ("_best_of_all_kernel", "sampling"),
    ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
    ("_window_combine_kernel", "attention"),
    ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>", "projections"),
    ("void at::native::vectorized_elementwise_kernel<4>", "small kernels"),
])  # fmt: skip
def test_kernels_are_sorted_into_classes(name: str, wanted: str) -> None:
    assert kernel_class(name) == wanted


def test_speedups_are_over_one_gpu_with_the_same_drafts_and_batch() -> None:
    figures: list[dict[str, Any]] = [
        {"tp": tp, "num_drafts": k, "batch": batch, "tokens_per_second": speed,
         "communication_share": 0.1 * tp}
        for tp, k, batch, speed in [
            (1, 0, 1, 10.0), (1, 3, 1, 20.0), (1, 3, 64, 100.0), (2, 3, 64, 150.0), (2, 3, 1, 30.0),
        ]
    ]  # fmt: skip
    assert [(row["batch"], row["speedup"]) for row in speedups(figures)] == [(64, 1.5), (1, 1.5)]


def test_idle_time_is_divided_into_seams_and_gaps() -> None:
    kernels = [
        ("Memcpy HtoD", 0.0, 1.0), ("a", 2.0, 4.0), ("b", 5.0, 9.0), ("Memcpy DtoH", 9.0, 10.0),
        ("Memcpy HtoD", 11.0, 12.0), ("a", 12.0, 14.0), ("b", 13.0, 20.0),
    ]  # fmt: skip
    assert idle_shares(kernels) == {"seam_share": 0.3, "gap_share": 0.1}


class InterruptedEngine:
    """Plans each step in 2 us; once, something comes in between."""

    def __init__(self) -> None:
        self.loop_counters = LoopCounters()

    def step(self) -> None:
        self.loop_counters.num_steps += 1
        interruption = 1e-3 if self.loop_counters.num_steps == 7 else 0
        self.loop_counters.plan_seconds += 2e-6 + interruption


def test_one_interrupted_step_is_seen_in_the_mean_alone() -> None:
    found = time_host(cast("Any", InterruptedEngine()))
    assert found["host_us_per_step"] == pytest.approx(2)
    assert found["host_us_tenth"] == pytest.approx(2)
    assert found["host_us_mean"] == pytest.approx(2 + 1000 / HOST_STEPS)


def test_what_tracked_rows_cost_is_told_by_the_kernels_that_differ_most() -> None:
    plain = {"scan": 10.0, "conv": 5.0, "norm": 1.0, "gone": 2.0, "same": 9.0}
    tracked = {"scan": 14.0, "conv": 4.5, "norm": 1.25, "same": 9.0, "copy": 3.0}
    more = largest_differences(plain, tracked)
    assert list(more.items()) == [("scan", 4.0), ("copy", 3.0), ("gone", -2.0), ("conv", -0.5)]


def test_calls_in_turn_change_places_and_keep_their_names() -> None:
    order: list[str] = []

    def call(name: str) -> str:
        order.append(name)
        return f"{name}{len(order)}"

    found = in_turn(2, lambda: call("a"), lambda: call("b"))
    assert "".join(order) == "abbaab"
    assert found == [["a4", "a5"], ["b3", "b6"]]


@pytest.mark.parametrize(("is_right", "wanted"), [(True, ["check", "measure"]), (False, ["check"])])
def test_a_failed_check_ends_a_run_without_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_right: bool, wanted: list[str]
) -> None:
    ran = []

    def check(_device: torch.device) -> list[dict[str, object]]:
        ran.append("check")
        return [harness.result("sum", 0.5, 1.0 if is_right else 0.1)]

    def measure(_device: torch.device) -> list[dict[str, object]]:
        ran.append("measure")
        return [{"us": 1.0}]

    output = tmp_path / "figures.json"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "a GPU")
    monkeypatch.setattr("sys.argv", ["bench", "--check", "--measure", "--output", str(output)])
    status = harness.main(None, {"check": check, "measure": measure})
    assert ran == wanted
    assert (status, output.exists()) == ((0, True) if is_right else (1, False))


def test_an_error_that_is_no_number_is_beyond_every_bound() -> None:
    bad = harness.relative(torch.tensor([1.0, float("nan")]), torch.ones(2))
    assert not harness.result("nan", bad, 1e9)["ok"]
    assert harness.relative(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 0.0])) == 4 / 3


@pytest.mark.parametrize("folder", ["linear_replay", "linear_chunk", "ssm_gates"])
def test_kernels_of_linear_layers_count_as_such(folder: str) -> None:
    files = list((Path(gapless.ops.__file__).parent / folder).glob("*kernel*.py"))
    names = [
        name for file in files for name in re.findall(r"def (_\w+_kernel)\(", file.read_text())
    ]
    assert names, "a folder of kernels has some"
    assert {kernel_class(name) for name in names} == {"linear state"}
