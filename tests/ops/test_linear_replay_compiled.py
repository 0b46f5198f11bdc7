"""What Triton's interpreter does not show: the replay kernels compile for sm_90, and none spills.

No GPU is needed. The launches are those of the op itself, stopped once their kernels are compiled,
in a process of their own, where Triton does not interpret.
"""

from __future__ import annotations

import pytest

from tests.ops.compiling import found_by

PROGRAM = """
import json, sys
import torch
from gapless.core.specs.linear import Recurrence
from gapless.ops.linear_replay import ReplayIndices, ReplayMemory
from gapless.ops.linear_replay import triton as replay
from tests.ops.compiling import catch_launches, stack_of

class OnGpu(torch.Tensor):
    is_cuda = True

compiled = catch_launches(replay)
recurrence, rows = Recurrence[sys.argv[1]], 64
key_heads, heads, dim = {"GATED_DELTA": (16, 32, 128), "KIMI_DELTA": (32, 32, 128),
                         "MAMBA2": (8, 128, 64)}[recurrence.name]
decay_dim = 128 if recurrence is Recurrence.KIMI_DELTA else 1
eps = None if recurrence is Recurrence.MAMBA2 else 1e-6
zeros, bf16, i64 = torch.zeros, torch.bfloat16, torch.int64
memory = ReplayMemory(
    zeros(1, heads, dim, 128), zeros(1, heads, dim), zeros(1, key_heads, 128, dtype=bf16),
    zeros(1, heads, decay_dim),
)
for width, replay_len, is_tree in ((1, 1, False), (1, 16, False), (4, 16, False), (4, 16, True)):
    read = zeros(rows, replay_len - 1 + width, dtype=i64)
    of_rows = zeros(rows, dtype=i64)
    written = zeros(rows, width, dtype=i64)
    indices = ReplayIndices(read, written, read > 0, of_rows, of_rows, of_rows)
    keys = zeros(rows, width, key_heads, 128, dtype=bf16).as_subclass(OnGpu)
    replay.replay_window(
        keys, keys, zeros(rows, width, heads, dim, dtype=bf16).as_subclass(OnGpu),
        None if recurrence is Recurrence.MAMBA2 else zeros(rows, width, heads),
        zeros(rows, width, heads, decay_dim), memory, indices, recurrence=recurrence,
        l2norm_eps=eps, scale=1.0, ancestors=indices.ring_write if is_tree else None,
    )
replay.materialize(
    memory, read, read > 0, read_rows=of_rows, out_rows=of_rows, l2norm_eps=eps
)
print(json.dumps([[kernel.name, stack_of(kernel)] for kernel in compiled]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("recurrence", ["GATED_DELTA", "KIMI_DELTA", "MAMBA2"])
def test_kernels_compile_and_none_spills(recurrence: str) -> None:
    found = found_by(PROGRAM, recurrence)
    packed = ["_token_kernel"]
    token = ["_token_weights_kernel", "_token_stream_kernel"]
    window = ["_window_scores_kernel", "_window_stream_kernel"]
    fold = ["_fold_stream_kernel"]
    if recurrence == "KIMI_DELTA":
        packed = token = ["_channel_token_kernel", "_token_stream_kernel"]
        window[0], fold = "_channel_window_kernel", ["_fold_weights_kernel", *fold]
    elif recurrence == "MAMBA2":
        token = packed
    assert [name for name, _ in found] == packed + token + 2 * window + fold
    assert all(stack == 0 for _, stack in found), found
