"""A drafter that knows the answers, and gives as many right ones as a script says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gapless.speculative.drafter import (
    Drafts,
    Frontier,
    Outcome,
    PromptChunk,
    Proposer,
    SavedSlots,
)
from tests.engine_fixtures import runner_of

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


class OracleDrafter:
    """Drafts from the tokens that plain decoding gave; scripted drafts after those are wrong.

    With `gaps`, rows at positions divisible by it are given no proposal at all.
    """

    reads_past = False

    def __init__(
        self, num_slots: int, num_positions: int, num_drafts: int, script: Script, *, gaps: int = 0
    ) -> None:
        self.num_drafts = num_drafts
        self._script = script
        self._gaps = gaps
        self.truth = torch.zeros(num_slots + 1, num_positions, dtype=torch.int64)

    def read_prompt(self, chunk: PromptChunk) -> Tensor:
        return chunk.last_token

    def read_window(self, outcome: Outcome) -> Tensor:
        return outcome.lens

    def draft(self, frontier: Frontier, carry: Tensor, proposer: Proposer) -> Drafts:
        depth = torch.arange(1, self.num_drafts + 1)
        at = (frontier.seq_lens[:, None] + depth).clamp(max=self.truth.shape[1] - 1)
        right = self.truth.index_select(0, frontier.slots).gather(1, at)
        num_right = self._script(frontier.seq_lens, self.num_drafts)[:, None]
        tokens = torch.where(depth <= num_right, right, (right + 1) % 256)
        counts = torch.full_like(frontier.seq_lens, self.num_drafts)
        if self._gaps:
            counts = counts.masked_fill(frontier.seq_lens % self._gaps == 0, 0)
        return Drafts(tokens, counts)

    @property
    def row_memory(self) -> list[Tensor]:
        return []

    def save(self, saved: SavedSlots) -> None:
        pass


def with_oracle(
    llm: LLM, truth: Mapping[tuple[int, ...], Sequence[int]], script: str, *, gaps: int = 0
) -> LLM:
    """Put an oracle in place of an engine's drafter; `truth` maps prompts to their outputs."""
    runner: Any = runner_of(llm)
    device = runner.device
    oracle = OracleDrafter(
        device.geometry.num_slots,
        device.num_page_columns * device.geometry.page_size,
        llm.engine.config.max_window - 1,
        SCRIPTS[script],
        gaps=gaps,
    )
    object.__setattr__(device, "drafter", oracle)
    run_prefill = runner._prefill.run

    def run(segments: Any) -> None:
        for segment in segments:
            prompt = segment.request.prompt_ids
            tokens = [*prompt, *truth[(*prompt, segment.request.seed)]]
            oracle.truth[segment.slot, : len(tokens)] = torch.tensor(tokens)
        run_prefill(segments)

    runner._prefill.run = run
    return llm
