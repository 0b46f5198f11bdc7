"""Drafters that know the answers, and give right ones where a script or chance says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.ops.draft_tree import ancestor_bits, depths
from gapless.speculative.drafter import (
    Drafts,
    Frontier,
    Outcome,
    PromptChunk,
    Proposer,
    SavedSlots,
)
from tests.engine_fixtures import runner_of
from tests.ops.trees import random_parents

if TYPE_CHECKING:
    from gapless import LLM

Script = Callable[[Tensor, int], Tensor]
"""`(positions [B] of the newest tokens, num_drafts) -> right drafts before the first wrong one`."""

SCRIPTS: dict[str, Script] = {
    "all": torch.full_like,
    "none": lambda at, k: at * 0,
    "alternating": lambda at, k: (at % 2) * k,
    "random": lambda at, k: (at * 2654435761 // 64) % (k + 1),
}


class Oracle:
    """What drafters from the tokens that plain decoding gave have in common."""

    reads_past = False

    def __init__(self, num_slots: int, num_positions: int, num_drafts: int) -> None:
        self.num_drafts = num_drafts
        self.truth = torch.zeros(num_slots + 1, num_positions, dtype=torch.int64)

    def read_prompt(self, chunk: PromptChunk) -> Tensor:
        return chunk.last_token

    def read_window(self, outcome: Outcome) -> Tensor:
        return outcome.lens

    def right(self, frontier: Frontier, depth: Tensor) -> Tensor:
        """The tokens [B, N] at depths [B or 1, N] after the newest."""
        at = (frontier.seq_lens[:, None] + depth).clamp(max=self.truth.shape[1] - 1)
        return self.truth.index_select(0, frontier.slots).gather(1, at)

    @property
    def row_memory(self) -> list[Tensor]:
        return []

    def save(self, saved: SavedSlots) -> None:
        pass


class OracleDrafter(Oracle):
    """Drafts chains; scripted drafts after the right ones are wrong.

    With `gaps`, rows at positions divisible by it are given no proposal at all.
    """

    def __init__(self, *sizes: int, script: Script, gaps: int = 0) -> None:
        super().__init__(*sizes)
        self._script = script
        self._gaps = gaps

    def draft(self, frontier: Frontier, carry: Tensor, proposer: Proposer) -> Drafts:
        depth = torch.arange(1, self.num_drafts + 1)
        right = self.right(frontier, depth[None])
        num_right = self._script(frontier.seq_lens, self.num_drafts)[:, None]
        tokens = torch.where(depth <= num_right, right, (right + 1) % 256)
        counts = torch.full_like(frontier.seq_lens, self.num_drafts)
        if self._gaps:
            counts = counts.masked_fill(frontier.seq_lens % self._gaps == 0, 0)
        return Drafts(tokens, counts)


class TreeOracle(Oracle):
    """Drafts trees of random shape; the right tokens lead to one of their nodes.

    Of some trees only the first nodes are proposals.
    """

    def __init__(self, *sizes: int, seed: int = 0) -> None:
        super().__init__(*sizes)
        self._generator = torch.Generator().manual_seed(seed)
        self.shapes: set[tuple[int, ...]] = set()

    def draft(self, frontier: Frontier, carry: Tensor, proposer: Proposer) -> Drafts:
        rows, width = frontier.slots.shape[0], 1 + self.num_drafts
        parents = random_parents(rows, width, self._generator)
        self.shapes.update(tuple(shape) for shape in parents.tolist())
        bits = ancestor_bits(parents)
        right = self.right(frontier, depths(bits, width))
        node = self._below(width, (rows, 1))
        on_path = bits.gather(1, node) >> torch.arange(width) & 1 == 1
        tokens = torch.where(on_path, right, (right + 1 + self._below(255, right.shape)) % 256)
        counts = torch.where(self._below(3, (rows,)) > 0, width - 1, self._below(width, (rows,)))
        return Drafts(tokens[:, 1:], counts, bits)

    def _below(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(high, shape, generator=self._generator)


def with_oracle(
    llm: LLM, truth: Mapping[tuple[int, ...], Sequence[int]], script: str, *, gaps: int = 0
) -> LLM:
    """Put an oracle in place of an engine's drafter; `truth` maps prompts to their outputs."""
    return install(llm, OracleDrafter(*_sizes(llm), script=SCRIPTS[script], gaps=gaps), truth)


def with_tree_oracle(
    llm: LLM, truth: Mapping[tuple[int, ...], Sequence[int]], *, seed: int = 0
) -> LLM:
    """The same with random trees."""
    return install(llm, TreeOracle(*_sizes(llm), seed=seed), truth)


def _sizes(llm: LLM) -> tuple[int, int, int]:
    device = runner_of(llm).device
    geometry = device.geometry
    num_positions = device.num_page_columns * geometry.page_size
    return geometry.num_slots, num_positions, geometry.max_window - 1


def install(llm: LLM, oracle: Oracle, truth: Mapping[tuple[int, ...], Sequence[int]]) -> LLM:
    """Put `oracle` in place of an engine's drafter."""
    runner: Any = runner_of(llm)
    device = runner.device
    object.__setattr__(device, "drafter", oracle)
    run_prefill = runner._prefill.run

    def run(segments: Any) -> Any:
        for segment in segments:
            prompt = segment.request.prompt_ids
            tokens = [*prompt, *truth[(*prompt, segment.request.seed)]]
            oracle.truth[segment.slot, : len(tokens)] = torch.tensor(tokens)
        return run_prefill(segments)

    runner._prefill.run = run
    return llm
