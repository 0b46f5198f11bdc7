"""How ranks agree on mailboxes, as far as that needs no GPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from torch import distributed

from gapless.engine.peer_memory import SENT_WORDS, PeerMemory, Table
from gapless.errors import BackendUnavailable, InternalError
from gapless.ops.peer_sum import Mailboxes
from gapless.ops.peer_sum.reference import is_served

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

WORLD_SIZE = 3


def trust() -> None:
    pass


def on_all_ranks(file: Path, call: Callable[[Table], object]) -> list[object]:
    def run(rank: int) -> object:
        store = distributed.FileStore(str(file), WORLD_SIZE)
        return call(Table(store, rank, WORLD_SIZE, trust))

    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        return list(pool.map(run, range(WORLD_SIZE)))


def test_ranks_find_what_each_left(tmp_path: Path) -> None:
    # handles are any bytes
    left = [bytes([0, rank, 255]) for rank in range(WORLD_SIZE)]
    found = on_all_ranks(tmp_path / "a", lambda table: table.exchange("x", left[table.rank]))
    assert found == [left] * WORLD_SIZE


def test_what_one_rank_cannot_use_none_uses(tmp_path: Path) -> None:
    def call(table: Table) -> tuple[str, str]:
        own = f"refused on {table.rank}" if table.rank else ""
        return table.complaint("first", ""), table.complaint("second", own)

    assert on_all_ranks(tmp_path / "a", call) == [("", "refused on 1")] * WORLD_SIZE


def test_a_rank_that_waits_hears_that_another_has_ended(tmp_path: Path) -> None:
    def check() -> None:
        raise InternalError("rank 1 failed")

    store = distributed.FileStore(str(tmp_path / "a"), 2)
    with pytest.raises(InternalError, match="rank 1 failed"):
        Table(store, 0, 2, check).exchange("x", b"own")


def test_two_ranks_send_a_step_of_256_rows() -> None:
    rows = torch.zeros(257, 2048, dtype=torch.bfloat16)
    assert is_served(rows[:256], SENT_WORDS)
    assert not is_served(rows, SENT_WORDS)
    assert not is_served(rows[:128], SENT_WORDS // 3)


def test_memory_is_given_back_in_the_opposite_order_whatever_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def unmap() -> None:
        done.append("unmap")
        raise BackendUnavailable("the device has failed")

    monkeypatch.setattr(torch.cuda, "device", lambda _device: torch.device("cpu"))
    zeros = torch.zeros(1, dtype=torch.int32)
    memory = PeerMemory(
        Mailboxes(0, torch.zeros(2, dtype=torch.int64), zeros, zeros.clone(), 8),
        [lambda: done.append("free"), unmap],
    )
    memory.stop()
    assert memory.mailboxes.is_stopped.item() != 0
    memory.close()
    memory.close()
    assert done == ["unmap", "free"]
