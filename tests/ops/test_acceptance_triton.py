"""The acceptance kernels against the torch chain, bit for bit, and that against a plain loop."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
import torch

from gapless.ops.acceptance import AcceptColumns, Settled, reference
from gapless.ops.draft_tree import ancestor_bits
from tests.ops.trees import random_parents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

NUM_SLOTS, MAX_WINDOW, NUM_STOPS, VOCAB = 12, 5, 8, 4
NULL = NUM_SLOTS


class Case:
    """Rows of random slots, the last ones padded; few ids, so that drafts and stops are hit."""

    def __init__(
        self, rows: int, padded: int, window: int, seed: int, max_window: int = MAX_WINDOW
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(high, shape, generator=generator)

        slots = NUM_SLOTS + 1
        lengths = draw(20, slots)
        stop_ids = torch.full((slots, NUM_STOPS), -1)
        stop_ids[:, 3] = draw(3 * VOCAB, slots)
        self.columns = AcceptColumns(
            seq_lens=lengths,
            checkpoint_len=draw(20, slots),
            done=draw(2, slots) == 0,
            window_tokens=draw(VOCAB, slots, max_window),
            num_drafts=draw(max_window, slots),
            limit_len=lengths + 1 + draw(9, slots),
            stop_ids=stop_ids,
        )
        for name, value in (("seq_lens", 0), ("checkpoint_len", 0), ("done", 1), ("num_drafts", 0)):
            getattr(self.columns, name)[NULL] = value
        self.slots = torch.randperm(NUM_SLOTS, generator=generator)[:rows]
        self.slots[rows - padded :] = NULL
        self.sampled = draw(VOCAB, rows, window)
        self.seq_lens = self.columns.seq_lens[self.slots]
        self.checkpoint_len = self.seq_lens // 4 * 4
        # of several positions each
        self.forced = draw(window, 7)
        self.bits = ancestor_bits(random_parents(rows, window, generator))
        self.bits[rows - padded :] = draw(1 << window, padded, window)

    def settle(
        self, *, by_kernel: bool, is_forced: bool, is_tree: bool = False
    ) -> tuple[Settled, AcceptColumns, torch.Tensor]:
        """Return the outcome, the columns after it, and what the host reads."""
        from gapless.ops.acceptance import triton

        columns = AcceptColumns(
            **{
                f.name: getattr(self.columns, f.name).clone().to(DEVICE)
                for f in fields(AcceptColumns)
            }
        )
        args = (self.sampled, self.slots, self.seq_lens, self.checkpoint_len)
        module = triton if by_kernel else reference
        settle = module.settle_trees if is_tree else module.settle_windows
        emitted = torch.full((len(self.slots), 2 + self.sampled.shape[1]), -7, device=DEVICE)
        found = settle(
            *(t.to(DEVICE) for t in args),
            columns,
            emitted,
            *([self.bits.to(DEVICE)] if is_tree else []),
            null_slot=NULL,
            forced=self.forced.to(DEVICE) if is_forced else None,
        )
        # any of the null rows' tokens may stay
        columns.window_tokens[NULL, 0] = 0
        return found, columns, emitted


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5])
def test_kernel_gives_the_chains_bits(window: int, is_forced: bool) -> None:
    for seed, (rows, padded) in enumerate([(1, 0), (1, 1), (2, 1), (7, 0), (12, 3), (12, 12)]):
        case = Case(rows, padded, window, seed)
        assert_same_bits(case, is_forced=is_forced)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("window", [1, 2, 5, 16])
def test_kernel_settles_trees_as_the_chain_does(window: int, is_forced: bool) -> None:
    for seed, (rows, padded) in enumerate([(1, 0), (7, 2), (12, 12)]):
        # few ids make children that share a token
        case = Case(rows, padded, window, seed, max_window=window + seed % 2)
        case.columns.num_drafts.clamp_(max=window - 1)
        assert_same_bits(case, is_forced=is_forced, is_tree=True)


def assert_same_bits(case: Case, **options: bool) -> None:
    *found_parts, emitted = case.settle(by_kernel=True, **options)
    *wanted_parts, wanted_emitted = case.settle(by_kernel=False, **options)
    assert torch.equal(emitted, wanted_emitted)
    for found, wanted in zip(found_parts, wanted_parts, strict=True):
        for field in fields(found):
            own, other = getattr(found, field.name), getattr(wanted, field.name)
            assert own.dtype == other.dtype, field.name
            assert torch.equal(own, other), field.name


@pytest.mark.parametrize("seed", range(3))
def test_chain_is_a_plain_loop(seed: int) -> None:
    case = Case(12, 2, 4, seed)
    found, columns, reported = case.settle(by_kernel=False, is_forced=False)
    before = case.columns
    lens = []
    for row, slot in enumerate(case.slots.tolist()):
        sampled = case.sampled[row].tolist()
        drafts = before.window_tokens[slot, 1:4].tolist()[: int(before.num_drafts[slot])]
        stops, total = set(before.stop_ids[slot].tolist()), int(case.seq_lens[row]) + 1
        emitted: list[int] = []
        ended = False
        for position, token in enumerate(sampled):
            emitted.append(token)
            ended = token in stops or total + len(emitted) >= int(before.limit_len[slot])
            if ended or position >= len(drafts) or drafts[position] != token:
                break
        is_null = slot == NULL
        lens.append(0 if is_null else len(emitted))
        assert reported[row].tolist() == [lens[-1], int(before.num_drafts[slot]), *sampled]
        assert int(found.newest[row]) == emitted[-1]
        assert int(found.live_slots[row]) == (NULL if ended or is_null else slot)
        assert bool(columns.done[slot]) == (ended or is_null)
        assert int(columns.seq_lens[slot]) == total - 1 + lens[-1]
        assert int(columns.checkpoint_len[slot]) == int(case.checkpoint_len[row])
        assert is_null or int(columns.window_tokens[slot, 0]) == emitted[-1]
    assert found.lens.tolist() == lens
    assert int(columns.seq_lens[NULL]) == int(columns.checkpoint_len[NULL]) == 0
    untouched = torch.tensor(
        sorted(set(range(NUM_SLOTS)) - set(case.slots.tolist())), device=DEVICE
    )
    for field in fields(columns):
        after = getattr(columns, field.name)[untouched]
        assert torch.equal(after.cpu(), getattr(before, field.name)[untouched.cpu()])
