"""Acceptance of draft trees against a walk in plain Python, and of chains as trees."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.ops import acceptance
from gapless.ops.acceptance import AcceptColumns, Settled, SettledTrees
from gapless.ops.draft_tree import ancestor_bits
from tests.ops.trees import MAX_WIDTH, bits_of, chain_parents, parent_lists, random_parents

# few tokens, so that children often hold the sample
NULL, VOCAB = 1, 2
trees = st.integers(1, MAX_WIDTH).flatmap(parent_lists)
tokens = st.integers(0, VOCAB - 1)


@dataclass
class Walk:
    """One row of a settled tree, by the definition."""

    path: list[int]
    emitted: list[int]
    is_over: bool


def walk(
    parents: list[int],
    window: list[int],
    sampled: list[int],
    num_drafts: int,
    room: int,
    stops: set[int],
    forced: int | None,
) -> Walk:
    """Follow the samples from node 0; `room` tokens are left before the limit."""
    node, found = 0, Walk([], [], is_over=False)
    while True:
        found.path.append(node)
        found.emitted.append(sampled[node])
        found.is_over = sampled[node] in stops or len(found.emitted) >= room
        children = [c for c in range(1, num_drafts + 1) if parents[c] == node]
        if forced is None:
            children = [c for c in children if window[c] == sampled[node]]
        elif len(found.emitted) > forced:
            children = []
        if found.is_over or not children:
            return found
        node = children[0]


@given(
    st.data(),
    trees,
    # as often as not the limit ends a walk
    st.integers(1, 6),
    st.sampled_from([{-1}, {-1}, {0, -1}]),
    st.none() | st.integers(0, MAX_WIDTH),
)
def test_walk_follows_the_samples(
    data: st.DataObject, parents: list[int], room: int, stops: set[int], forced: int | None
) -> None:
    width, length = len(parents), 20
    drawn = st.lists(tokens, min_size=width, max_size=width)
    window, sampled = data.draw(drawn), data.draw(drawn)
    num_drafts = data.draw(st.sampled_from([width - 1, width - 1, width // 2]))
    columns = AcceptColumns(
        seq_lens=torch.tensor([length, 0]),
        checkpoint_len=torch.tensor([3, 0]),
        done=torch.tensor([False, True]),
        # tables hold larger windows too
        window_tokens=torch.tensor([[*window, 0], [1] * (width + 1)]),
        num_drafts=torch.tensor([num_drafts, width - 1]),
        limit_len=torch.tensor([length + 1 + room, 0]),
        stop_ids=torch.tensor([sorted(stops) + [-1] * (2 - len(stops)), [-1, -1]]),
    )
    alone = torch.tensor([[1 << node for node in range(width)]])
    emitted = torch.zeros(2, 2 + width, dtype=torch.int64)
    # other positions are not asked for
    forced_at = torch.arange(length + 9)
    if forced is not None:
        forced_at[[0 + 1, length + 1]] = forced
    found = acceptance.settle_trees(
        torch.tensor([sampled, [1] * width]),
        torch.tensor([0, NULL]),
        torch.tensor([length, 0]),
        torch.tensor([15, 0]),
        columns,
        emitted,
        torch.cat([bits_of(parents), alone]),
        null_slot=NULL,
        forced=None if forced is None else forced_at,
    )
    wanted = walk(parents, window, sampled, num_drafts, room, stops, forced)
    count = len(wanted.path)
    padding = width - count
    assert found.path.tolist() == [wanted.path + wanted.path[-1:] * padding, [0] * width]
    assert found.tokens[0].tolist() == wanted.emitted + wanted.emitted[-1:] * padding
    assert found.lens.tolist() == [count, 0]
    assert emitted[0].tolist() == [count, num_drafts, *found.tokens[0].tolist()]
    assert emitted[1].tolist() == [0, width - 1, *found.tokens[1].tolist()]
    assert found.newest[0] == wanted.emitted[-1]
    assert found.live_slots.tolist() == [NULL if wanted.is_over else 0, NULL]
    assert found.seq_lens.tolist() == columns.seq_lens.tolist() == [length + count, 0]
    assert columns.checkpoint_len.tolist() == [15, 0]
    assert columns.done.tolist() == [wanted.is_over, True]
    assert columns.window_tokens[0].tolist() == [wanted.emitted[-1], *window[1:], 0]


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("width", [1, 2, 5, MAX_WIDTH])
def test_a_chain_settles_as_a_tree_of_one_path(width: int, is_forced: bool) -> None:
    slots = torch.randperm(40)
    slots[30:] = 40
    columns = AcceptColumns(
        seq_lens=torch.randint(0, 20, (41,)),
        checkpoint_len=torch.zeros(41, dtype=torch.int64),
        done=torch.arange(41) == 40,
        window_tokens=torch.randint(0, 2, (41, width)),
        num_drafts=torch.randint(0, width, (41,)),
        limit_len=torch.randint(10, 60, (41,)),
        stop_ids=torch.where(torch.rand(41, 8) < 0.02, 1, -1),
    )
    columns.seq_lens[40] = 0
    sampled = torch.randint(0, 2, (40, width))
    forced = torch.randint(0, width, (16,)) if is_forced else None
    outcomes: list[tuple[Settled, AcceptColumns, torch.Tensor]] = []
    for bits in (None, ancestor_bits(chain_parents(40, width))):
        own = AcceptColumns(**{f.name: getattr(columns, f.name).clone() for f in fields(columns)})
        args = (sampled, slots, columns.seq_lens[slots], columns.seq_lens[slots], own)
        emitted = torch.zeros(40, 2 + width, dtype=torch.int64)
        options = {"null_slot": 40, "forced": forced}
        if bits is None:
            settled = acceptance.settle_windows(*args, emitted, **options)
        else:
            settled = acceptance.settle_trees(*args, emitted, bits, **options)
        # any of the null rows' tokens may stay
        own.window_tokens[40] = 0
        outcomes.append((settled, own, emitted))
    (chain, chain_columns, reported), (tree, tree_columns, tree_reported) = outcomes
    assert torch.equal(reported[:30, :2], tree_reported[:30, :2])
    assert torch.equal(reported[:, 2:], sampled)
    for field in fields(Settled):
        assert torch.equal(getattr(chain, field.name)[:30], getattr(tree, field.name)[:30])
    for field in fields(AcceptColumns):
        assert torch.equal(getattr(chain_columns, field.name), getattr(tree_columns, field.name))
    assert isinstance(tree, SettledTrees)
    kept = torch.arange(width) < tree.lens[:, None]
    assert torch.equal(tree.tokens[kept], sampled[kept])
    assert torch.equal(tree.path[kept], torch.arange(width).expand(40, width)[kept])


def test_every_path_of_a_tree_can_be_accepted() -> None:
    generator = torch.Generator().manual_seed(3)
    parents = random_parents(20, MAX_WIDTH, generator)
    bits = ancestor_bits(parents)
    node = torch.arange(MAX_WIDTH)
    for end in range(MAX_WIDTH):
        # every node holds its own number, and a sample is the next one on the way to `end`
        sampled = torch.full((20, MAX_WIDTH), MAX_WIDTH)
        on_path = (bits[:, end : end + 1] >> node) & 1 == 1
        for row in range(20):
            path = node[on_path[row]]
            sampled[row, path[:-1]] = path[1:]
        columns = AcceptColumns(
            seq_lens=torch.zeros(21, dtype=torch.int64),
            checkpoint_len=torch.zeros(21, dtype=torch.int64),
            done=torch.zeros(21, dtype=torch.bool),
            window_tokens=node.repeat(21, 1),
            num_drafts=torch.full((21,), MAX_WIDTH - 1),
            limit_len=torch.full((21,), 100),
            stop_ids=torch.full((21, 8), -1),
        )
        zeros = torch.zeros(20, dtype=torch.int64)
        emitted = torch.zeros(20, 2 + MAX_WIDTH, dtype=torch.int64)
        found = acceptance.settle_trees(
            sampled, torch.arange(20), zeros, zeros, columns, emitted, bits, null_slot=20
        )
        assert torch.equal(found.lens, on_path.sum(1))
        for row in range(20):
            path = node[on_path[row]].tolist()
            assert found.path[row].tolist() == path + [end] * (MAX_WIDTH - len(path))
