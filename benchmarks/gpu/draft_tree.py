"""Draft trees on a GPU: attention under ancestor masks, settling and compaction.

    python -m benchmarks.gpu.draft_tree --check --measure [--output figures.json]

Checks compare with the definitions, attention in float64 and integers bit for bit; a chain must
come out the same as a tree. Times are those of CUDA graphs; `chain_us` is the time of the
same window as a chain, or for compaction that of the torch operations that define it.
"""

from __future__ import annotations

import sys
from dataclasses import fields, is_dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.attention import (
    BOUNDS,
    PAGE_SIZE,
    QWEN3_5_35B,
    SHAPES,
    Heads,
    Rows,
)
from benchmarks.gpu.harness import READ_BANDWIDTH, ROTATED_BYTES, main, relative, result, time_us
from benchmarks.gpu.mla import FEW, V3, LatentRows, Latents
from gapless.attention.reference import ReferenceAttention
from gapless.attention.triton import TritonAttention
from gapless.ops.acceptance import AcceptColumns
from gapless.ops.acceptance import reference as acceptance_reference
from gapless.ops.acceptance import triton as acceptance
from gapless.ops.draft_tree import TreeMask, ancestor_bits
from gapless.ops.draft_tree import reference as tree_reference
from gapless.ops.draft_tree import triton as trees
from gapless.ops.step_metadata import Geometry, SlotColumns, StepConstants
from gapless.ops.step_metadata import reference as metadata_reference
from gapless.ops.step_metadata import triton as metadata

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

BF16, FP32 = torch.bfloat16, torch.float32
REPLAYS = 15
LAUNCHES = 20
NUM_SLOTS = 128
WIDTH = 4
# what the hybrid 35B model keeps: layers, entries' shape and dtype, of its KV and of its rings
KV_POOLS = ((10, (2, 2, 256), BF16),)
CONV_POOLS = ((30, (8192,), BF16),)
RING_POOLS = ((30, (32, 128), FP32), (30, (16, 128), BF16), (30, (32, 1), FP32))


def random_bits(rows: int, window: int, device: torch.device, *, is_chain: bool = False) -> Tensor:
    """Return the masks [B, W] of random trees, or of chains."""
    node = torch.arange(window, device=device)
    if is_chain:
        return ancestor_bits((node - 1).clamp(min=0).repeat(rows, 1))
    return ancestor_bits((torch.rand(rows, window, device=device) * node).long())


class Steps:
    """Slots at random lengths whose windows are trees, some done, with what they settle."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.window = window
        self.geometry = geometry = Geometry(
            num_slots=NUM_SLOTS,
            num_pages=NUM_SLOTS * 8,
            page_size=PAGE_SIZE,
            num_state_rows=NUM_SLOTS,
            replay_len=16,
            ring_len=16 + 2 * window,
            conv_width=WIDTH,
            conv_ring_len=WIDTH - 1 + window,
            max_window=window,
        )
        slots, null = NUM_SLOTS + 1, geometry.null_slot

        def draw(high: int, *shape: int) -> Tensor:
            return torch.randint(high, (slots, *shape), device=device)

        seq_lens, done = draw(90), draw(5) == 0
        seq_lens[null], done[null] = 0, True
        pages = torch.randperm(geometry.num_pages, device=device).view(NUM_SLOTS, 8)
        self.columns = SlotColumns(
            seq_lens=seq_lens,
            checkpoint_len=(seq_lens - 1).clamp(min=0) // 16 * 16,
            state_rows=torch.arange(slots, device=device),
            done=done,
            page_table=torch.cat([pages, torch.full_like(pages[:1], geometry.null_page)]),
            window_tokens=draw(3, window),
        )
        self.accepted = AcceptColumns(
            seq_lens=seq_lens.clone(),
            checkpoint_len=self.columns.checkpoint_len.clone(),
            done=done.clone(),
            window_tokens=self.columns.window_tokens.clone(),
            num_drafts=torch.full_like(seq_lens, window - 1),
            limit_len=seq_lens + 1 + draw(30),
            stop_ids=draw(90, 8),
        )
        self.constants = StepConstants(geometry, device)
        self.tree = random_bits(slots, window, device)

    def slots(self, rows: int) -> Tensor:
        """Return rows of which a quarter is padded."""
        slots = torch.randperm(NUM_SLOTS, device=self.tree.device)[:rows]
        slots[rows - rows // 4 :] = self.geometry.null_slot
        return slots

    def indices(self, slots: Tensor) -> Any:
        """Return the kernel's index tensors."""
        return metadata.window_indices(
            slots, self.columns, self.geometry, window=self.window, tree=self.tree
        )

    def settle(self, module: Any, indices: Any, sampled: Tensor, columns: AcceptColumns) -> Any:
        """Settle trees by a module's operation."""
        return module.settle_trees(
            sampled, indices.slots, indices.seq_lens, indices.fold_len, columns,
            sampled.new_empty(len(sampled), 2 + self.window), indices.ancestors,
            null_slot=self.geometry.null_slot,
        )  # fmt: skip

    def moves(self, module: Any, indices: Any, settled: Any) -> Any:
        """Return the moves of what was settled, by a module's operation."""
        return module.path_moves(
            settled.path, settled.lens, indices.slots, indices.seq_lens,
            self.columns.page_table, self.geometry,
        )  # fmt: skip

    def pools(self, shapes: Sequence[Any], entries: int) -> list[Tensor]:
        """Return stacked pools of random numbers."""
        device = self.tree.device
        return [
            torch.randn(layers, entries, *entry, device=device).to(dtype)
            for layers, entry, dtype in shapes
        ]


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    return [*_attention_results(device), *_step_results(device)]


def _attention_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for shape, dtype, window in product((*SHAPES, FEW, V3), BOUNDS, (5, 16)):
        if shape is V3 and dtype is FP32:
            continue
        label = f"{shape} {str(dtype).removeprefix('torch.')} W={window}"
        rows = _rows(shape, (1, 1500, 40, 255, 256 - window // 2, 700), window, device)
        pool, q = rows.pool(dtype, first=1), rows.q(dtype)
        bits = random_bits(rows.slots.numel(), window, device)
        wanted = _attend(rows, ReferenceAttention, q.double(), pool.double(), bits)
        out = _attend(rows, TritonAttention, q, pool, bits)
        yield result(f"tree window {label}", relative(out, wanted), BOUNDS[dtype])
        chain = random_bits(rows.slots.numel(), window, device, is_chain=True)
        pair = (_attend(rows, TritonAttention, q, pool, own) for own in (chain, None))
        differing = int((next(pair) != next(pair)).sum())
        yield result(f"chain as a tree {label}: numbers that differ", differing, 0)


def _rows(
    shape: Heads | Latents, lengths: Sequence[int], window: int, device: torch.device
) -> Rows:
    if isinstance(shape, Latents):
        return LatentRows(shape, lengths, window, device)
    return Rows(shape, lengths, window, device)


def _attend(rows: Rows, kind: type[Any], q: Tensor, pool: Tensor, bits: Tensor | None) -> Tensor:
    tree = None if bits is None else TreeMask(rows.positions[:, 0].contiguous(), bits)
    plan = rows.backend(kind).plan_window(
        rows.slots, rows.positions, rows.page_table, kv_len=rows.kv_len, first=1, tree=tree
    )
    shape: Any = rows.heads
    if isinstance(shape, Latents):
        found: Tensor = plan.run_latent(q, pool, shape.scale, value_dim=shape.rank)
    else:
        found = plan.run(q, pool, shape.head_dim**-0.5)
    return found


def _step_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for window, rows in product((2, 7, 16), (1, 33, NUM_SLOTS)):
        step, label = Steps(window, device), f"{rows} rows W={window}"
        slots = step.slots(rows)
        found = step.indices(slots)
        wanted = metadata_reference.window_indices(
            slots, step.columns, step.geometry, step.constants, window=window, tree=step.tree
        )
        yield result(f"window_indices {label}: tensors that differ", _differing(found, wanted), 0)
        sampled = torch.randint(3, (rows, window), device=device)
        outcomes = []
        for module in (acceptance, acceptance_reference):
            own = {f.name: getattr(step.accepted, f.name).clone() for f in fields(AcceptColumns)}
            columns = AcceptColumns(**own)
            settled = step.settle(module, found, sampled, columns)
            # any of the null rows' tokens may stay
            columns.window_tokens[step.geometry.null_slot, 0] = 0
            outcomes.append((settled, columns))
        differing = sum(_differing(a, b) for a, b in zip(*outcomes, strict=True))
        yield result(f"settle_trees {label}: tensors that differ", differing, 0)
        moves = step.moves(metadata, found, outcomes[0][0])
        differing = _differing(moves, step.moves(metadata_reference, found, outcomes[0][0]))
        yield result(f"path_moves {label}: tensors that differ", differing, 0)
        yield from _compact_results(step, moves, label)


def _compact_results(step: Steps, moves: Any, label: str) -> Iterator[dict[str, Any]]:
    """Compact along a path, and with rows in any order."""
    entries = step.geometry.ring_zero
    order = torch.rand(moves.ring_write.shape, device=step.tree.device).argsort(1)
    shuffled = moves.ring_write.gather(1, order)
    is_null = moves.ring_write[:, :1] // step.geometry.ring_len == step.geometry.null_slot
    reads = {"path": moves.ring_read, "any order": shuffled.where(~is_null, moves.ring_write)}
    for name, read in reads.items():
        pools = step.pools([(3, *shape[1:]) for shape in (*CONV_POOLS, *RING_POOLS)], entries)
        wanted = [pool.clone() for pool in pools]
        trees.compact(pools, read, moves.ring_write)
        tree_reference.compact(wanted, read, moves.ring_write)
        differing = sum(int((a != b).sum()) for a, b in zip(pools, wanted, strict=True))
        yield result(f"compact {label} {name}: numbers that differ", differing, 0)


def _differing(found: Any, wanted: Any) -> int:
    if is_dataclass(found):
        pairs = ((getattr(found, f.name), getattr(wanted, f.name)) for f in fields(found))
        return sum(_differing(a, b) for a, b in pairs)
    return int(not torch.equal(found, wanted))


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, and what it is compared with."""
    torch.manual_seed(0)
    found = []
    for shape, window, batch in product((QWEN3_5_35B, FEW), (4, 8, 16), (1, 32)):
        found += _window_row(shape, window, batch, device)
    for window, rows in product((8, 16), (1, 32, NUM_SLOTS)):
        found += _step_rows(window, rows, device)
    return found


def _window_row(
    shape: Heads | Latents, window: int, batch: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    context = 4096
    rows = _rows(shape, [context - window] * batch, window, device)
    q, first = rows.q(BF16), rows.pool(BF16, first=0)
    count = min(32, max(2, ROTATED_BYTES // first.nbytes))
    pools = [first] + [first.clone() for _ in range(count - 1)]
    us = {}
    for name, bits in (("tree", random_bits(batch, window, device)), ("chain", None)):
        launches = [
            lambda pool=pool, bits=bits: _attend(rows, TritonAttention, q, pool, bits)
            for pool in pools
        ]
        us[name] = time_us(launches, REPLAYS)
    floor = first[0].nbytes * batch * context / READ_BANDWIDTH * 1e6
    name = f"window {shape} {batch} rows of {context} W={window}"
    yield {"name": name, "us": us["tree"], "chain_us": us["chain"], "floor_us": floor}


def _step_rows(window: int, rows: int, device: torch.device) -> Iterator[dict[str, Any]]:
    step = Steps(window, device)
    slots = torch.randperm(NUM_SLOTS, device=device)[:rows]
    step.columns.done[:-1] = False
    indices = step.indices(slots)
    sampled = torch.randint(3, (rows, window), device=device)
    settled = step.settle(acceptance, indices, sampled, step.accepted)
    # half of the window is kept, every entry of it from farther on
    path = torch.arange(window, device=device).mul(2).clamp(max=window - 1).repeat(rows, 1)
    lens = torch.full_like(settled.lens, window // 2)
    moves = metadata.path_moves(
        path, lens, indices.slots, indices.seq_lens, step.columns.page_table, step.geometry
    )
    label = f"{rows} rows W={window}"
    small = {
        "window_indices": lambda: step.indices(slots),
        "settle_trees": lambda: step.settle(acceptance, indices, sampled, step.accepted),
        "path_moves": lambda: step.moves(metadata, indices, settled),
    }
    for name, launch in small.items():
        yield {"name": f"{name} {label}", "us": time_us([launch] * LAUNCHES, REPLAYS)}
    geometry = step.geometry
    kinds = {
        "KV": (KV_POOLS, geometry.num_pages * PAGE_SIZE, moves.kv_read, moves.kv_write),
        "conv": (CONV_POOLS, geometry.conv_zero, moves.conv_read, moves.conv_write),
        "rings": (RING_POOLS, geometry.ring_zero, moves.ring_read, moves.ring_write),
    }
    for name, kind in kinds.items():
        yield {"name": f"compact {name} {label}"} | _compact_times(step, *kind)


def _compact_times(
    step: Steps, shapes: Sequence[Any], entries: int, read: Tensor, write: Tensor
) -> dict[str, float]:
    pools = step.pools(shapes, entries)
    us, chain_us = (
        time_us([lambda op=op: op(pools, read, write)] * 3, REPLAYS)
        for op in (trees.compact, tree_reference.compact)
    )
    moved = int((read != write).sum()) * sum(pool[:, 0].nbytes for pool in pools)
    return {"us": us, "chain_us": chain_us, "floor_us": 2 * moved / READ_BANDWIDTH * 1e6}


if __name__ == "__main__":
    sys.exit(main(__doc__, {"check": check, "measure": measure}))
