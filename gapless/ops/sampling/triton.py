"""`reference.sample` without a sort: thresholds by bisection, greedy rows skipped on the device.

Four stages, of which a greedy row takes the first and last:

    maximum   the largest logit of each split of a row
    survey    for top-k and top-p: how many tokens, and how much mass, lie above each of a few cuts
    collect   without those filters: the best perturbed logit of each split; with them: the tokens
              above the highest cut that is sure to hold all that is kept
    choose    the filters' thresholds by bisection over what was collected, and the best of the rest

Kernels read a row's parameters in the slot table's columns: nothing is gathered for them. The same
tokens as the definition, save where rounding decides: a share of top-p is a sum of
integers here and a running float sum there. NaN is never chosen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.sampling.arithmetic import SCRATCH_LEN
from gapless.ops.sampling.choose_kernel import _choose_kernel
from gapless.ops.sampling.mask_kernel import _mask_kernel
from gapless.ops.sampling.noise_kernels import _noise_kernel
from gapless.ops.sampling.shard_kernels import _best_of_all_kernel, _shard_best_kernel
from gapless.ops.sampling.split_kernels import _collect_kernel, _maximum_kernel, _survey_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.sampling.masks import MaskRows
    from gapless.ops.sampling.reference import SamplingMode, SamplingRows

# tokens that a row's filters are settled among; where more may be kept, among the whole row
CAPACITY = 8192
BLOCK = 1024
SURVEY_BLOCK = 256  # of a tile with a column per cut
CHOOSE_BLOCK = 2048
MAX_VOCAB_SIZE = 1 << 20  # counts and masses of a row stay far from overflow
# tokens that a program reads, in a small batch and in others; no result depends on it
SPLITS = (1024, 8192)
SMALL_BATCH = 8


def unsupported(logits: Tensor) -> str | None:
    """Return why the kernels cannot serve these logits, None if they can."""
    if logits.dtype is not torch.float32:
        return f"logits of {logits.dtype}"
    if logits.shape[1] > MAX_VOCAB_SIZE:
        return f"{logits.shape[1]} tokens, want at most {MAX_VOCAB_SIZE}"
    return None


def sample(
    logits: Tensor,  # [N, V] float32, rows may be strided
    positions: Tensor,  # [N] int64
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    capacity: int = CAPACITY,
    split: int | None = None,  # tokens per program, a multiple of BLOCK
) -> Tensor:  # [N] int64
    """See `reference.sample`. Two launches without temperatures, four with; no sync."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row's logits are contiguous"
    device = logits.device
    tokens = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return tokens
    split = split or SPLITS[num_rows > SMALL_BATCH]
    num_splits = triton.cdiv(vocab_size, split)
    is_drawn = not mode.is_greedy

    def parts() -> tuple[Tensor, Tensor]:
        shape = (num_rows, num_splits)
        return (
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
        )

    largest = parts()
    # what greedy rows never touch is stood in for
    scratch, drawn, kept = tokens, largest, largest
    if is_drawn:
        scratch = torch.empty(num_rows, SCRATCH_LEN.value, dtype=torch.int64, device=device)
        drawn = parts()
        kept = (
            torch.empty(num_rows, capacity, dtype=torch.float32, device=device),
            torch.empty(num_rows, capacity, dtype=torch.int32, device=device),
        )
    columns = rows.columns
    at = (positions.contiguous(), rows.slots)
    filters = (columns.temperature, columns.top_k, columns.top_p)
    noise, stops = (columns.min_p, columns.seeds), (columns.min_len, columns.stop_ids)
    sizes: dict[str, Any] = {
        "V": vocab_size,
        "STOPS": columns.stop_ids.shape[1] if mode.edits_logits else 0,
    }
    sizes |= chained(logits)
    block_s = triton.next_power_of_2(num_splits)
    grid = (num_splits, num_rows)
    strides = (logits.stride(0), num_splits, rows.repeat)
    _maximum_kernel[grid](
        logits, *at, *stops, scratch, *largest, *strides,
        SPLIT=split, BLOCK=BLOCK, IS_DRAWN=is_drawn, **sizes, num_warps=4,
    )  # fmt: skip
    if is_drawn:
        _survey_kernel[grid](
            logits, *at, *filters, *stops, scratch, *largest, *strides,
            SPLIT=split, BLOCK=SURVEY_BLOCK, BLOCK_S=block_s, **sizes, num_warps=4,
        )  # fmt: skip
        _collect_kernel[grid](
            logits, *at, *filters, *noise, *stops, scratch, *largest, *drawn, *kept, *strides,
            SPLIT=split, BLOCK=BLOCK, BLOCK_S=block_s, CAPACITY=capacity, **sizes, num_warps=4,
        )  # fmt: skip
    _choose_kernel[(num_rows,)](
        logits, *at, *filters, *noise, *stops, scratch, *largest, *drawn, *kept, tokens,
        *strides,
        BLOCK=CHOOSE_BLOCK, BLOCK_S=block_s, CAPACITY=capacity, IS_DRAWN=is_drawn, **sizes,
        num_warps=8 if is_drawn else 1,
    )  # fmt: skip
    return tokens


def mask_logits(logits: Tensor, rows: MaskRows) -> Tensor:
    """See `masks.mask_logits`: the same values."""
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == rows.masks.stride(1) == 1, "a row's entries are contiguous"
    masked = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if masked.numel():
        grid = (triton.cdiv(vocab_size, BLOCK), num_rows)
        _mask_kernel[grid](
            logits, rows.mask_of, rows.masks, masked, logits.stride(0), rows.masks.stride(0),
            V=vocab_size, BLOCK=BLOCK, num_warps=4, **chained(logits),
        )  # fmt: skip
    return masked


def shard_best(
    logits: Tensor,  # [N, C] float32, rows may be strided
    positions: Tensor,  # [N] int64
    rows: SamplingRows,
    *,
    mode: SamplingMode,
    first: int,
    split: int | None = None,  # tokens per program, a multiple of BLOCK
) -> Tensor:  # [N, M, 2] float32
    """See `shards.shard_best`: of runs of `split` ids each. One launch; no sync."""
    num_rows, num_ids = logits.shape
    assert mode.is_plain, "the best of a shard says nothing about what filters and edits leave"
    assert logits.stride(1) == 1, "a row's logits are contiguous"
    split = split or SPLITS[num_rows > SMALL_BATCH]
    # as many on every rank, wherever its noise begins
    num_splits = triton.cdiv(num_ids + 3, split)
    pairs = torch.empty(num_rows, num_splits, 2, dtype=torch.float32, device=logits.device)
    if num_rows:
        _shard_best_kernel[(num_splits, num_rows)](
            logits, positions.contiguous(), rows.slots, rows.columns.temperature,
            rows.columns.seeds, pairs, logits.stride(0), first, num_splits, rows.repeat,
            V=num_ids, SPLIT=split, BLOCK=BLOCK, LEAD=first % 4, IS_DRAWN=not mode.is_greedy,
            num_warps=4, **chained(logits),
        )  # fmt: skip
    return pairs


def best_of_all(pairs: Tensor, vocab_size: int) -> Tensor:
    """See `shards.best_of_all`."""
    num_rows, num_pairs, _ = pairs.shape
    assert pairs.is_contiguous(), "a row's pairs are contiguous"
    tokens = torch.empty(num_rows, dtype=torch.int64, device=pairs.device)
    if num_rows:
        _best_of_all_kernel[(num_rows,)](
            pairs, tokens, num_pairs, V=vocab_size,
            BLOCK=triton.next_power_of_2(num_pairs), num_warps=1, **chained(pairs),
        )  # fmt: skip
    return tokens


def gumbel_noise(seeds: Tensor, positions: Tensor, num_ids: int, first: int = 0) -> Tensor:
    """See `philox.gumbel_noise`: the same bits on the same device."""
    num_rows = seeds.shape[0]
    out = torch.empty(num_rows, num_ids, dtype=torch.float32, device=seeds.device)
    if out.numel():
        lead = first % 4
        grid = (triton.cdiv(lead + num_ids, BLOCK), num_rows)
        _noise_kernel[grid](
            seeds.contiguous(),
            positions.contiguous(),
            out,
            first,
            V=num_ids,
            BLOCK=BLOCK,
            LEAD=lead,
            num_warps=4,
            **chained(out),
        )
    return out
