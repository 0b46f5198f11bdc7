"""Pools of pages and ids, the reservation, and what the cache manager gives to a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.cache.limits import CacheLimits
from gapless.cache.manager import Admission, CacheManager
from gapless.cache.pages import PagePool, largest_reserved_len, num_pages_for, reserved_len
from gapless.cache.rows import IdPool
from gapless.core.draft_shape import TreeShape
from gapless.core.plan import PageEntry
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams


def make_request(prompt_len: int, limit_len: int) -> Request:
    return Request(
        request_id="r",
        prompt_ids=tuple(range(prompt_len)),
        params=SamplingParams(),
        seed=0,
        stop_ids=(),
        limit_len=limit_len,
    )


def make_manager(num_pages: int, num_state_rows: int = 2, max_window: int = 1) -> CacheManager:
    return CacheManager(
        CacheLimits(
            num_pages=num_pages,
            page_size=3,
            num_state_rows=num_state_rows,
            max_window=max_window,
            uses_prefix_cache=False,
        )
    )


def admit(manager: CacheManager, request: Request) -> bool:
    return isinstance(manager.admit(request, is_alone=True), Admission)


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (3, 1), (4, 2), (7, 3)])
def test_num_pages_for(tokens: int, pages: int) -> None:
    assert num_pages_for(tokens, 3) == pages


def test_reserved_len_of_plain_decode() -> None:
    assert [reserved_len(c, 1, 12) for c in (5, 8, 9, 10, 11)] == [7, 10, 11, 11, 11]


def test_reserved_len_of_a_window() -> None:
    assert [reserved_len(c, 4, 20) for c in (5, 10, 11, 12, 19)] == [16, 21, 22, 22, 22]


@given(window=st.integers(1, 6), limit_len=st.integers(2, 30), data=st.data())
def test_reserved_len_covers_every_step(window: int, limit_len: int, data: st.DataObject) -> None:
    """Play the unread step and the planned one, each emitting what it likes."""
    committed_len = data.draw(st.integers(1, limit_len - 2)) if limit_len > 2 else 0
    reserved = reserved_len(committed_len, window, limit_len)
    start, touched = committed_len, 0
    for _ in range(2):
        is_done = start + 1 >= limit_len
        if is_done:
            break
        emitted = data.draw(st.integers(1, min(window, limit_len - 1 - start)))
        drafts_from = start + emitted
        touched = max(touched, start + window)
        if window > 1:
            touched = max(touched, drafts_from + 1)
            if drafts_from + 1 < limit_len:
                touched = max(touched, drafts_from + window - 1)
        start = drafts_from
    assert touched <= reserved <= largest_reserved_len(window, limit_len)


TREES = [TreeShape(1, 2), TreeShape(2, 3), TreeShape(3, 4), TreeShape(5, 8), TreeShape(15, 2)]


def _touched_by_trees(
    committed_len: int, window: int, limit_len: int, tree: TreeShape, emitted: tuple[int, int]
) -> int:
    """Play two steps over trees; return one past the last position that they touch."""
    start, touched = committed_len, 0
    for count in emitted:
        if start + 1 >= limit_len:
            break
        touched = max(touched, start + window)
        newest = start + min(count, limit_len - 1 - start)
        touched = max(touched, newest + 1)
        if newest + 1 < limit_len:
            # a position for each draft that a pass goes on from
            for depth in range(1, tree.num_steps):
                first = newest + 1 + (depth - 1) * tree.topk
                touched = max(touched, first + tree.topk)
        start = newest
    return touched


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("window", [6, 9, 16])
def test_reserved_len_of_a_tree_is_what_its_steps_touch(window: int, tree: TreeShape) -> None:
    most = 1 + tree.num_steps
    for limit_len in (3, 5, 12, 40, 200):
        highest = 0
        for committed_len in range(limit_len - 1):
            touched = max(
                _touched_by_trees(committed_len, window, limit_len, tree, (a, b))
                for a in range(1, most + 1)
                for b in range(1, most + 1)
            )
            reserved = reserved_len(committed_len, window, limit_len, tree)
            assert touched <= reserved
            if committed_len + 2 * most + 1 < limit_len:
                assert touched == reserved
            highest = max(highest, touched)
        if limit_len > 3 * most:
            assert highest == largest_reserved_len(window, limit_len, tree)


def test_pages_are_handed_out_once_and_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.allocate(2), pool.allocate(3)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    pool.release(second)
    assert pool.num_free == 3
    again = pool.allocate(3)
    assert again is not None
    assert sorted(again) == sorted(second)


def test_allocate_gives_all_or_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.num_free == 3
    assert pool.allocate(0) == []


@pytest.mark.parametrize("page", [-1, 3])
def test_foreign_page_is_refused(page: int) -> None:
    pool = PagePool(3)
    pool.allocate(3)
    with pytest.raises(AssertionError, match="not one of 3"):
        pool.release([page])


def test_a_shared_page_is_free_once_nobody_holds_it() -> None:
    pool = PagePool(2)
    pages = pool.allocate(1)
    assert pages is not None
    pool.share(pages)
    pool.release(pages)
    assert (pool.num_free, pool.num_holders(pages[0])) == (1, 1)
    pool.release(pages)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.share(pages)


def test_double_release_is_refused() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    assert pages is not None
    with pytest.raises(AssertionError, match="twice"):
        pool.release([pages[0], pages[0]])


def test_ids_are_handed_out_lowest_first() -> None:
    pool = IdPool(3)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, None]
    pool.free(2)
    pool.free(0)
    assert pool.num_free == 2
    assert pool.allocate() == 0


def test_wrong_ids_are_refused() -> None:
    pool = IdPool(2)
    with pytest.raises(AssertionError, match="twice"):
        pool.free(0)
    with pytest.raises(AssertionError, match="not one of 2"):
        pool.free(2)


def test_admit_gives_tokens_and_reservation() -> None:
    manager, request = make_manager(num_pages=4), make_request(prompt_len=5, limit_len=30)
    assert admit(manager, request)
    assert len(request.pages) == 3  # 5 tokens, 2 more positions
    assert request.state_row == 0
    manager.check_conserved([request])


@pytest.mark.parametrize(("num_pages", "num_state_rows"), [(2, 1), (9, 0)])
def test_admit_gives_nothing_if_it_cannot_give_all(num_pages: int, num_state_rows: int) -> None:
    manager = make_manager(num_pages, num_state_rows)
    request = make_request(prompt_len=5, limit_len=30)
    assert not admit(manager, request)
    assert request.pages == []
    assert request.state_row == -1
    assert (manager.num_free_pages, manager.num_free_rows) == (num_pages, num_state_rows)


def test_grow_names_the_entries_it_adds() -> None:
    manager, request = make_manager(num_pages=5), make_request(prompt_len=5, limit_len=30)
    assert admit(manager, request)
    request.slot, request.committed_len = 7, 7
    assert manager.grow(request, is_alone=True) == []
    request.committed_len = 8
    entries = manager.grow(request, is_alone=True)
    assert entries == [PageEntry(slot=7, index=3, page=request.pages[3])]
    request.committed_len = 20
    assert manager.grow(request, is_alone=True) is None
    assert len(request.pages) == 4


def test_release_returns_everything() -> None:
    manager, request = make_manager(num_pages=5), make_request(prompt_len=5, limit_len=30)
    assert admit(manager, request)
    assert manager.release(request, 4) is None
    assert (request.pages, request.state_row) == ([], -1)
    assert (manager.num_free_pages, manager.num_free_rows) == (5, 2)


def test_conservation_check_sees_a_loss_and_a_double_owner() -> None:
    manager, request = make_manager(num_pages=5), make_request(prompt_len=5, limit_len=30)
    assert admit(manager, request)
    with pytest.raises(AssertionError, match="holders"):
        manager.check_conserved([])
    with pytest.raises(AssertionError, match="page 0 has 1 holders, want 2"):
        manager.check_conserved([request, request])
