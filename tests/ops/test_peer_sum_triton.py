"""Sums and gathers through mailboxes: the same bits on every rank, whatever was in them before.

Ranks are run one after another on one device. With `is_stopped` set, a rank sends and gives up;
once all have sent, each is run again from the same count of calls and finds everything.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from gapless.ops.peer_sum import Mailboxes
from gapless.ops.peer_sum.reference import (
    PROGRAM_WORDS,
    is_gathered,
    is_served,
    num_bytes,
    num_programs,
    peer_gather,
    peer_sum,
)

if TYPE_CHECKING:
    from collections.abc import Callable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

CAPACITY = 3 * PROGRAM_WORDS


def make_mailboxes(
    world_size: int, entries: list[torch.Tensor], is_stopped: torch.Tensor
) -> list[Mailboxes]:
    addresses = torch.tensor([own.data_ptr() for own in entries], device=DEVICE)
    return [
        Mailboxes(
            rank,
            addresses,
            torch.zeros(num_programs(CAPACITY), dtype=torch.int32, device=DEVICE),
            is_stopped,
            CAPACITY,
        )
        for rank in range(world_size)
    ]


def make_entries(world_size: int) -> torch.Tensor:
    return torch.zeros(num_bytes(world_size, CAPACITY) // 8, dtype=torch.int64, device=DEVICE)


class Ranks:
    """All ranks' mailboxes on one device."""

    def __init__(self, world_size: int) -> None:
        self.entries = [make_entries(world_size) for _ in range(world_size)]
        self.is_stopped = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE == "cuda")
        self.mailboxes = make_mailboxes(world_size, self.entries, self.is_stopped)

    def sum(self, terms: list[torch.Tensor]) -> list[torch.Tensor]:
        from gapless.ops.peer_sum import triton

        return self._call(triton.peer_sum, terms)

    def gather(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        from gapless.ops.peer_sum import triton

        return self._call(triton.peer_gather, parts)

    def _call(
        self, call: Callable[[torch.Tensor, Mailboxes], torch.Tensor], own: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        self.is_stopped.fill_(1)
        for mailboxes, x in zip(self.mailboxes, own, strict=True):
            call(x, replace(mailboxes, num_calls=mailboxes.num_calls.clone()))
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.is_stopped.zero_()
        return [call(x, mailboxes) for mailboxes, x in zip(self.mailboxes, own, strict=True)]


def terms_of(world_size: int, count: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.float32:
        terms = [torch.randn(count, generator=generator) for _ in range(world_size)]
        # orders of addition that differ must be seen
        terms[0] *= 1e4
    else:
        # sums without rounding: the interpreter cuts bfloat16 off where a GPU rounds
        terms = [
            torch.randint(-60, 60, (count,), generator=generator).float() for _ in range(world_size)
        ]
    return [term.to(DEVICE, dtype) for term in terms]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_the_sum_in_the_order_of_ranks(
    world_size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gapless.ops.peer_sum import triton

    # the interpreter polls slowly
    monkeypatch.setattr(triton, "POLLS_PER_LOOK", 2)
    ranks = Ranks(world_size)
    # longer and shorter by turns: programs take part in some of the calls only
    for seed, count in enumerate((10, 2 * CAPACITY, 6, 2 * PROGRAM_WORDS + 2, CAPACITY, 10)):
        room = CAPACITY if dtype is torch.float32 else 2 * CAPACITY
        terms = terms_of(world_size, min(count, room), dtype, seed)
        before = [term.clone() for term in terms]
        wanted = peer_sum(terms)
        for found in ranks.sum(terms):
            assert found.dtype is dtype
            assert torch.equal(found, wanted)
        for term, kept in zip(terms, before, strict=True):
            assert torch.equal(term, kept)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_has_all_parts_side_by_side(
    world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gapless.ops.peer_sum import triton

    monkeypatch.setattr(triton, "POLLS_PER_LOOK", 2)
    ranks = Ranks(world_size)
    generator = torch.Generator().manual_seed(world_size)
    shapes = [(5, 2), (1, CAPACITY), (700, 2), (7, 41), (PROGRAM_WORDS, 3), (1, 1)]
    for shape in shapes:
        # any bits: NaN, infinities and both zeros among them
        words = torch.randint(-(2**31), 2**31, (world_size, *shape), generator=generator)
        words[:, ::3] = torch.tensor([-0.0]).view(torch.int32).long()
        parts = [part.to(torch.int32).to(DEVICE).view(torch.float32) for part in words]
        halves = [part.view(torch.bfloat16) for part in parts]
        for own in (parts, halves):
            wanted = peer_gather(own)
            # sums and gathers take the same turns
            total = peer_sum([torch.ones(9, device=DEVICE)] * world_size)
            assert all(torch.equal(x, total) for x in ranks.sum([total / world_size] * world_size))
            for found in ranks.gather(own):
                assert found.dtype is wanted.dtype
                assert found.shape == wanted.shape
                assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def test_rows_that_are_no_whole_words_are_not_gathered() -> None:
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert is_gathered(x, 12)
    assert not is_gathered(x, 11)
    assert not is_gathered(x.view(8, 3), 12)
    assert is_gathered(x.view(8, 3).float(), 24)
    assert not is_gathered(x.double(), 100)


def test_a_rank_that_is_one_call_ahead_overwrites_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from gapless.ops.peer_sum import triton

    monkeypatch.setattr(triton, "POLLS_PER_LOOK", 2)
    ranks = Ranks(2)
    first, second = ranks.mailboxes
    ranks.is_stopped.fill_(1)
    own, other, following = (torch.full((10,), value, device=DEVICE) for value in (1.0, 2.0, 30.0))
    # the second rank has sent, and is slow to look at what came
    triton.peer_sum(other, replace(second, num_calls=second.num_calls.clone()))
    assert torch.equal(triton.peer_sum(own, first), own + other)
    triton.peer_sum(following, first)
    assert torch.equal(triton.peer_sum(other, second), own + other)


def test_messages_that_are_not_served() -> None:
    x = torch.zeros(4, 6, dtype=torch.bfloat16)
    assert is_served(x, 12)
    assert not is_served(x, 11)
    assert not is_served(x[:, ::2], 12)
    assert not is_served(x[:0], 12)
    assert not is_served(x.double(), 100)
    assert not is_served(x.view(-1)[:3], 12)
    assert not is_served(x.view(-1)[1:3], 12)
    assert is_served(x.view(-1)[2:4], 12)
    assert is_served(x.float(), 24)


def sum_often(rank: int, entries: list[torch.Tensor], result: torch.Tensor) -> None:
    """One rank of a sum in which each waits for the others."""
    from gapless.ops.peer_sum import triton

    torch.set_num_threads(1)
    mailboxes = make_mailboxes(len(entries), entries, torch.zeros(1, dtype=torch.int32))[rank]
    for call in range(result.shape[1]):
        # the other rank is early, and must not take what it finds from two calls before
        time.sleep(0.03 * rank)
        term = torch.full((7,), float(10 * call + rank))
        result[rank, call] = triton.peer_sum(term, mailboxes)


# said by Python 3.12 and later; the other thread is the one that takes orders of a test worker
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu has the ranks of several GPUs")
def test_ranks_at_their_own_pace() -> None:
    world_size, num_calls = 2, 12
    entries = [make_entries(world_size).share_memory_() for _ in range(world_size)]
    result = torch.zeros(world_size, num_calls, 7).share_memory_()
    context = multiprocessing.get_context("fork")
    children = [
        context.Process(target=sum_often, args=(rank, entries, result))
        for rank in range(world_size)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    wanted = torch.arange(num_calls).mul(20.0).add(1.0)[None, :, None].expand_as(result)
    assert torch.equal(result, wanted)
