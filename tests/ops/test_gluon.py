"""What the tests' multiprocessor finds: parts that read too early, and that wait for ever."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tests.ops.gluon import Launcher


@gluon.jit
def _bring(source, smem, full):
    async_copy.async_copy_global_to_shared(smem, source + gl.arange(0, 128, None))
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def _double(out, smem, full, phase):
    mbarrier.wait(full, phase)
    gl.store(out + gl.arange(0, 128, None), 2 * smem.load(None))


@gluon.jit
def _kernel(source, out, phase, count):
    smem = gl.allocate_shared_memory(gl.float32, [128], None)
    full = gl.allocate_shared_memory(gl.int64, [1], None)
    mbarrier.init(full, count=count)
    gl.warp_specialize(
        [(_bring, (source, smem, full)), (_double, (out, smem, full, phase))], [4], []
    )


def doubled(phase: int, count: int) -> torch.Tensor:
    source, out = torch.arange(128.0), torch.empty(128)
    Launcher(_kernel)[1,](source, out, phase, count)
    return out


def test_a_part_that_waits_reads_what_has_come() -> None:
    assert torch.equal(doubled(phase=0, count=128), 2 * torch.arange(128.0))


def test_a_part_that_does_not_wait_reads_nothing() -> None:
    # the phase before the first has always ended
    assert doubled(phase=1, count=128).isnan().all()


def test_parts_that_wait_for_ever_are_named() -> None:
    with pytest.raises(RuntimeError, match="wait for each other: _double 1"):
        doubled(phase=0, count=129)


def test_arrivals_beyond_a_barrier_are_told() -> None:
    with pytest.raises(AssertionError, match="more have arrived"):
        doubled(phase=0, count=64)
