"""What Triton's interpreter does not show: the kernels around the model's layers compile for sm_90.

No GPU is needed. The launches are those of the ops themselves, stopped once their kernels are
compiled, in a process of their own, where Triton does not interpret.
"""

from __future__ import annotations

import pytest

from tests.ops.compiling import found_by

PROGRAM = """
import json
import torch
from gapless.ops.acceptance import AcceptColumns, triton as acceptance
from gapless.ops.sampling import MaskRows, SamplingColumns, SamplingMode, SamplingRows
from gapless.ops.sampling import triton as sampling
from gapless.ops.step_metadata import FreshPages, Geometry, SlotColumns, triton as metadata
from tests.ops.compiling import catch_launches

compiled = catch_launches(acceptance, metadata, sampling)

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
    found = found_by(PROGRAM)
    assert all(waits for _, waits in found), found
    assert {name for name, _ in found} == {
        f"_{name}_kernel"
        for name in (
            "maximum", "survey", "collect", "choose", "noise", "mask", "shard_best", "best_of_all",
            "settle_windows", "settle_trees", "window_indices", "path_moves", "extend_indices",
            "draft_indices",
        )
    }  # fmt: skip
