"""Windows that are draft trees, by every backend, against one query at a time in float64.

What no query of a row sees is NaN.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch

from gapless.attention.backend import BACKENDS
from gapless.attention.reference import ReferenceAttention
from gapless.ops.draft_tree import TreeMask, ancestor_bits, depths
from gapless.ops.mla import window_latent_attention
from gapless.ops.paged_attention import window_attention
from tests.ops.trees import chain_parents, random_parents

if TYPE_CHECKING:
    from collections.abc import Callable

    from gapless.attention.backend import AttentionBackend, PlannedAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

PAGE_SIZE, COLUMNS = 16, 12
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
RANK, ROPE_DIM = 24, 8
SCALE = 0.3
# committed: less than a page, a whole block of positions, nearly and more than a program takes
LENGTHS = (1, 64, 124, 141)
NAN = float("nan")


def make(name: str) -> AttentionBackend:
    if name == "reference":
        chosen = ReferenceAttention
    else:
        from gapless.attention.triton import TritonAttention as chosen
    return chosen(page_size=PAGE_SIZE, max_len=COLUMNS * PAGE_SIZE, device=DEVICE)


@dataclass
class Rows:
    """Rows of Q nodes over pages that are NaN except where some query of a row sees them."""

    positions: torch.Tensor  # [B, Q]
    start: torch.Tensor  # [B]
    bits: torch.Tensor  # [B, Q]
    first: int = 0

    def __post_init__(self) -> None:
        rows, num_queries = self.bits.shape
        self.slots = torch.randperm(rows)
        pages = torch.randperm(rows * COLUMNS).view(rows, COLUMNS)
        # the null slot's row names the null page
        self.page_table = torch.cat([pages, torch.full((1, COLUMNS), rows * COLUMNS)])
        entries = (rows * COLUMNS + 1) * PAGE_SIZE
        self.kv = torch.full((entries, 2, KV_HEADS, HEAD_DIM), NAN)
        self.latents = torch.full((entries, RANK + ROPE_DIM), NAN)
        for row in range(rows):
            for query in range(num_queries):
                seen = self.seen(row, query)
                self.kv[seen] = torch.randn(len(seen), *self.kv.shape[1:])
                self.latents[seen] = torch.randn(len(seen), *self.latents.shape[1:])
        self.q = torch.randn(rows * num_queries, HEADS, HEAD_DIM)

    def seen(self, row: int, query: int) -> torch.Tensor:
        """Entries that a query sees."""
        start, bits = int(self.start[row]), int(self.bits[row, query])
        nodes = [start + node for node in range(63) if bits >> node & 1]
        position = torch.tensor([*range(self.first, start), *nodes])
        page = self.page_table[self.slots[row], position // PAGE_SIZE]
        return page * PAGE_SIZE + position % PAGE_SIZE

    def plan(self, name: str, tree: TreeMask | None) -> PlannedAttention:
        moved = (x.to(DEVICE) for x in (self.slots, self.positions, self.page_table))
        kv_len = COLUMNS * PAGE_SIZE
        return make(name).plan_window(*moved, kv_len=kv_len, first=self.first, tree=tree)

    @property
    def tree(self) -> TreeMask:
        return TreeMask(self.start.to(DEVICE), self.bits.to(DEVICE))

    def run(self, plan: PlannedAttention, *, is_latent: bool) -> torch.Tensor:
        q = self.q.to(DEVICE)
        if is_latent:
            return plan.run_latent(q, self.latents.to(DEVICE), SCALE, value_dim=RANK).cpu()
        return plan.run(q, self.kv.to(DEVICE), SCALE).cpu()

    def wanted(self, *, is_latent: bool) -> torch.Tensor:
        kv, latents = self.kv.double(), self.latents.double()
        out = []
        for row, query in torch.cartesian_prod(*map(torch.arange, self.bits.shape)).tolist():
            own = self.seen(row, query)[None]
            q = self.q[None, None, row * self.bits.shape[1] + query].double()
            mask = torch.ones(1, 1, own.shape[1], dtype=torch.bool)
            if is_latent:
                found = window_latent_attention(q, latents, own, mask, SCALE, value_dim=RANK)
            else:
                found = window_attention(q, kv, own, mask, SCALE)
            out.append(found[0, 0])
        return torch.stack(out)


def whole_windows(width: int, lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """Every node of a window asks."""
    generator = torch.Generator().manual_seed(width)
    start = torch.tensor(lengths)
    bits = ancestor_bits(random_parents(len(lengths), width, generator))
    return Rows(start[:, None] + torch.arange(width), start, bits)


def draft_pass(num_queries: int, lengths: tuple[int, ...] = LENGTHS) -> Rows:
    """The last nodes but one of a tree ask; nodes of other branches, and what is past, are NaN."""
    generator = torch.Generator().manual_seed(num_queries)
    start = torch.tensor(lengths) + 3
    bits = ancestor_bits(random_parents(len(lengths), 16, generator))[:, -num_queries - 1 : -1]
    positions = start[:, None] + torch.arange(15 - num_queries, 15)
    return Rows(positions, start, bits, first=1)


def from_the_first() -> Rows:
    """Trees without committed positions, whose queries do not all see node 0's position."""
    bits = torch.tensor([[0b0001, 0b0010], [0b0100, 0b1000], [0b0001, 0b1001]])
    start = torch.full((3,), 1)
    positions = torch.tensor([[1, 2], [3, 4], [1, 4]])
    return Rows(positions, start, bits, first=1)


CASES: list[Callable[[], Rows]] = [
    lambda: whole_windows(7),
    lambda: whole_windows(16, (64, 17)),
    lambda: draft_pass(1),
    lambda: draft_pass(4, (1, 60)),
    from_the_first,
]


@pytest.mark.parametrize("is_latent", [False, True], ids=["full", "latent"])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("name", BACKENDS)
def test_queries_see_their_ancestors(name: str, case: int, is_latent: bool) -> None:
    rows = CASES[case]()
    found = rows.run(rows.plan(name, rows.tree), is_latent=is_latent)
    wanted = rows.wanted(is_latent=is_latent)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("is_latent", [False, True], ids=["full", "latent"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_chain_is_a_tree_of_one_path(name: str, is_latent: bool) -> None:
    start = torch.tensor([17, 141])
    bits = ancestor_bits(chain_parents(2, 5))
    rows = Rows(start[:, None] + torch.arange(5), start, bits)
    results = [rows.run(rows.plan(name, tree), is_latent=is_latent) for tree in (None, rows.tree)]
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize("is_latent", [False, True], ids=["full", "latent"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_row_of_nan_leaves_its_neighbours_alone(name: str, is_latent: bool) -> None:
    rows = whole_windows(3, (5, 17, 9))
    before = rows.run(rows.plan(name, rows.tree), is_latent=is_latent)
    for pool in (rows.kv, rows.latents):
        pool[rows.seen(1, 0)[:1]] = NAN
    after = rows.run(rows.plan(name, rows.tree), is_latent=is_latent)
    assert torch.equal(after[:3], before[:3])
    assert torch.equal(after[6:], before[6:])
    assert after[3:6].isnan().all()


def test_the_cases_have_branches() -> None:
    """Else the tests above would hold for a causal mask."""
    for make_rows in CASES[:2]:
        rows = make_rows()
        width = rows.bits.shape[1]
        assert (depths(rows.bits, width)[:, -1] < width - 1).any()
