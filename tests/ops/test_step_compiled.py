"""What Triton's interpreter does not show: the kernels around the model's layers compile for sm_90.

No GPU is needed. The launches are those of the ops themselves, stopped once their kernels are
compiled, in a process of their own, where Triton does not interpret.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction
from gapless.ops.acceptance import AcceptColumns, triton as acceptance
from gapless.ops.sampling import MaskRows, SamplingColumns, SamplingMode, SamplingRows
from gapless.ops.sampling import triton as sampling
from gapless.ops.step_metadata import FreshPages, Geometry, SlotColumns, triton as metadata

class Driver:
    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

def compile_only(kernel, *args, grid, warmup, **settings):
    compiled.append(run(kernel, *args, grid=grid, warmup=True, **settings))

compiled = []
run, JITFunction.run = JITFunction.run, compile_only
triton.runtime.driver.set_active(Driver())
for ops in (acceptance, metadata, sampling):
    ops.chained = lambda x: {"CHAINED": True, "launch_pdl": True}

def zeros(*shape, dtype=torch.int64):
    return torch.zeros(shape, dtype=dtype)

f32, slots, rows, window, vocab_size = torch.float32, 9, 2, 4, 151936
row = zeros(rows)
columns = SamplingColumns(
    zeros(slots, dtype=f32), zeros(slots), zeros(slots, dtype=f32), zeros(slots, dtype=f32),
    zeros(slots), zeros(slots), zeros(slots, 8),
)
for repeat, mode in [(r, m) for r in (1, window) for m in SamplingMode]:
    logits, at = zeros(rows * repeat, vocab_size, dtype=f32), zeros(rows * repeat)
    named = SamplingRows(columns, row, repeat)
    sampling.sample(logits, at, named, mode=mode)
    if mode.is_plain:
        sampling.shard_best(logits, at, named, mode=mode, first=vocab_size // 2)
sampling.best_of_all(zeros(rows, 32, 2, dtype=f32), vocab_size)
sampling.gumbel_noise(row, row, vocab_size)
masks = MaskRows(zeros(len(logits), dtype=torch.int32), zeros(3, 4748, dtype=torch.int32))
sampling.mask_logits(logits, masks)

accepted = AcceptColumns(
    zeros(slots), zeros(slots), zeros(slots, dtype=torch.bool), zeros(slots, window),
    zeros(slots), zeros(slots), zeros(slots, 8),
)
sampled, emitted = zeros(rows, window), zeros(rows, 2 + window)
for forced in (None, zeros(4096)):
    options = {"null_slot": slots - 1, "forced": forced}
    acceptance.settle_windows(sampled, row, row, row, accepted, emitted, **options)
    acceptance.settle_trees(sampled, row, row, row, accepted, emitted, sampled, **options)

geometry = Geometry(
    num_slots=slots - 1, num_pages=99, page_size=64, num_state_rows=20, replay_len=16,
    ring_len=24, conv_width=4, conv_ring_len=7, max_window=window,
)
pages = zeros(slots, 40)
held = SlotColumns(
    zeros(slots), zeros(slots), zeros(slots), zeros(slots, dtype=torch.bool), pages,
    zeros(slots, window),
)
fresh = FreshPages(zeros(rows, 2), zeros(rows, 2))
for tree in (None, zeros(slots, window)):
    metadata.window_indices(row, held, geometry, window=window, tree=tree, fresh=fresh)
metadata.window_indices(row, held, geometry, window=1)
metadata.path_moves(sampled, row, row, row, pages, geometry)
metadata.extend_indices(row, row, row, pages, geometry, width=window)
metadata.draft_indices(row, row, pages, geometry, count=3)
print(json.dumps([[k.name, "griddepcontrol.wait" in k.asm["ptx"]] for k in compiled]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_compile_and_are_chained() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert all(waits for _, waits in found), found
    assert {name for name, _ in found} == {
        f"_{name}_kernel"
        for name in (
            "maximum", "survey", "collect", "choose", "noise", "mask", "shard_best", "best_of_all",
            "settle_windows", "settle_trees", "window_indices", "path_moves", "extend_indices",
            "draft_indices",
        )
    }  # fmt: skip
