"""Step metadata of draft trees, and the moves of accepted paths, against plain Python."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.ops.draft_tree import ancestor_bits, compact
from gapless.ops.step_metadata import (
    Geometry,
    SlotColumns,
    StepConstants,
    path_moves,
    window_indices,
)
from tests.ops.trees import MAX_WIDTH, ancestry, chain_parents, parent_lists

PAGE_SIZE, COLUMNS, NUM_SLOTS = 3, 30, 3
trees = st.integers(1, MAX_WIDTH).flatmap(parent_lists)
lengths = st.integers(0, 40)


def make_geometry(max_window: int, *, width: int = 4, replay_len: int = 5) -> Geometry:
    return Geometry(
        num_slots=NUM_SLOTS,
        num_pages=(NUM_SLOTS + 1) * COLUMNS,
        page_size=PAGE_SIZE,
        num_state_rows=NUM_SLOTS,
        replay_len=replay_len,
        ring_len=replay_len + 2 * max_window,
        conv_width=width,
        conv_ring_len=width - 1 + max_window,
        max_window=max_window,
    )


def make_columns(geometry: Geometry, seq_lens: list[int]) -> SlotColumns:
    slots = torch.arange(NUM_SLOTS + 1)
    lens = torch.tensor([*seq_lens, 0])
    return SlotColumns(
        seq_lens=lens,
        checkpoint_len=lens // geometry.replay_len * geometry.replay_len,
        state_rows=slots,
        done=slots == geometry.null_slot,
        page_table=torch.randperm(geometry.num_pages).view(NUM_SLOTS + 1, COLUMNS),
        window_tokens=torch.randint(99, (NUM_SLOTS + 1, geometry.max_window)),
    )


@given(trees, lengths, st.integers(1, 4))
def test_nodes_are_stored_in_order_and_read_along_their_path(
    parents: list[int], length: int, conv_width: int
) -> None:
    width = len(parents)
    geometry = make_geometry(width + 1, width=conv_width)
    columns = make_columns(geometry, [7, length, 2])
    tree = ancestor_bits(torch.tensor([[0] * (width + 1), [*parents, 0]])).repeat(2, 1)
    # what the null slot's row holds does not matter
    tree[geometry.null_slot] = 0
    slots = torch.tensor([1, geometry.null_slot])
    constants = StepConstants(geometry, torch.device("cpu"))
    found = window_indices(slots, columns, geometry, constants, window=width, tree=tree)
    assert torch.equal(found.ancestors[0], tree[1, :width])
    assert torch.equal(found.tokens, columns.window_tokens[slots, :width])
    taps = found.conv_taps.view(conv_width, 2, width)
    for node in range(width):
        path, stored = ancestry(parents, node), length + node
        assert found.positions[0, node] == stored
        assert found.logical[0, node] == length + len(path) - 1
        assert found.sampled_at[0, node] == length + len(path)
        page = columns.page_table[1, stored // PAGE_SIZE]
        assert found.kv_write[node] == page * PAGE_SIZE + stored % PAGE_SIZE
        assert found.replay.ring_write[0, node] == geometry.ring_len + stored % geometry.ring_len
        ring = geometry.conv_ring_len
        assert found.conv_write[node] == ring + stored % ring
        for distance in range(conv_width):
            back = length + len(path) - 1 - distance
            wanted = length + path[distance] if distance < len(path) else back
            entry = ring + wanted % ring if wanted >= 0 else geometry.conv_zero
            assert taps[conv_width - 1 - distance, 0, node] == entry
    # nodes of a padded row see themselves, at position 0
    assert found.ancestors[1].tolist() == [1 << node for node in range(width)]
    assert found.logical[1].tolist() == [0] * width
    assert torch.equal(taps[-1, 1], found.conv_write[width:])


def test_taps_of_a_tree_keep_apart_in_the_ring() -> None:
    geometry = make_geometry(MAX_WIDTH)
    columns = make_columns(geometry, [19, 20, 21])
    constants = StepConstants(geometry, torch.device("cpu"))
    tree = ancestor_bits(torch.zeros(NUM_SLOTS + 1, MAX_WIDTH, dtype=torch.int64))
    slots = torch.arange(NUM_SLOTS)
    found = window_indices(slots, columns, geometry, constants, window=MAX_WIDTH, tree=tree)
    committed = found.conv_taps.view(4, NUM_SLOTS, MAX_WIDTH)[:3, :, 0]
    for row in range(NUM_SLOTS):
        written = set(found.conv_write.view(NUM_SLOTS, -1)[row].tolist())
        assert len(written) == MAX_WIDTH
        assert not written & set(committed[:, row].tolist())


def test_a_chain_is_a_tree_of_one_path() -> None:
    geometry = make_geometry(MAX_WIDTH)
    columns = make_columns(geometry, [0, 2, 33])
    columns.done[2] = True
    constants = StepConstants(geometry, torch.device("cpu"))
    tree = ancestor_bits(chain_parents(NUM_SLOTS + 1, MAX_WIDTH))
    slots = torch.tensor([1, 0])
    chain = window_indices(slots, columns, geometry, constants, window=MAX_WIDTH)
    found = window_indices(slots, columns, geometry, constants, window=MAX_WIDTH, tree=tree)
    assert chain.ancestors is None
    assert chain.logical is chain.positions
    for name in (
        "positions",
        "logical",
        "sampled_at",
        "tokens",
        "kv_write",
        "conv_write",
        "conv_taps",
        "live",
    ):
        assert torch.equal(getattr(found, name), getattr(chain, name)), name
    assert torch.equal(found.replay.ring_write, chain.replay.ring_write)


@given(st.data(), trees, lengths)
def test_moves_put_the_path_at_consecutive_positions(
    data: st.DataObject, parents: list[int], length: int
) -> None:
    width = len(parents)
    geometry = make_geometry(width)
    columns = make_columns(geometry, [7, length, 2])
    kept = ancestry(parents, data.draw(st.integers(0, width - 1)))[::-1]
    path = torch.tensor([kept + kept[-1:] * (width - len(kept)), [0] * width])
    slots, lens = torch.tensor([1, geometry.null_slot]), torch.tensor([len(kept), 0])
    moves = path_moves(path, lens, slots, columns.seq_lens[slots], columns.page_table, geometry)
    stored = torch.arange(length, length + width)
    homes = {
        "kv": columns.page_table[1, stored // PAGE_SIZE] * PAGE_SIZE + stored % PAGE_SIZE,
        "ring": geometry.ring_len + stored % geometry.ring_len,
        "conv": geometry.conv_ring_len + stored % geometry.conv_ring_len,
    }
    for name, home in homes.items():
        read, write = getattr(moves, f"{name}_read"), getattr(moves, f"{name}_write")
        pool = torch.full((1, int(max(write.max(), home.max())) + 1), -1)
        # an entry holds its node
        pool[0, home] = torch.arange(width)
        compact([pool], read, write)
        assert pool[0, home].tolist() == kept + list(range(len(kept), width)), name
        assert torch.equal(read[1], write[1]), name


@given(st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 9))] * NUM_SLOTS))
def test_rows_that_fold_come_first_in_order(rows: tuple[tuple[int, int], ...]) -> None:
    geometry = make_geometry(1)
    starts = [geometry.replay_len * start for start, _ in rows]
    lens = [start + ahead for start, (_, ahead) in zip(starts, rows, strict=True)]
    columns = make_columns(geometry, lens)
    columns.checkpoint_len[:NUM_SLOTS] = torch.tensor(starts)
    found = window_indices(
        torch.tensor([2, geometry.null_slot, 0, 1]), columns, geometry,
        StepConstants(geometry, torch.device("cpu")), window=1,
    ).replay  # fmt: skip
    folds = found.fold_mask.any(1).tolist()
    assert found.order.tolist() == sorted(range(len(folds)), key=lambda row: not folds[row])
