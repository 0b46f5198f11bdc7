"""Prompt lookup against a plain search."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gapless.speculative.drafter import Frontier
from gapless.speculative.ngram import LONGEST_MATCH, NgramDrafter

NUM_DRAFTS = 3


def _search(text: list[int]) -> list[int]:
    """Tokens after the latest earlier occurrence of the longest matching end."""
    for length in range(LONGEST_MATCH, 0, -1):
        end = text[len(text) - length :]
        if len(end) < length:
            continue
        for stop in range(len(text) - 1, length - 1, -1):
            if text[stop - length : stop] == end:
                return text[stop : stop + NUM_DRAFTS]
    return []


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=24), min_size=1, max_size=4))
def test_drafts_equal_a_search(texts: list[list[int]]) -> None:
    drafter = NgramDrafter(
        num_slots=4, num_positions=40, num_drafts=NUM_DRAFTS, device=torch.device("cpu")
    )
    drafter._tokens.fill_(1)  # what a former tenant left
    for slot, text in enumerate(texts):
        drafter._tokens[slot, : len(text)] = torch.tensor(text)
    newest = torch.tensor([len(text) - 1 for text in texts])
    frontier = Frontier(
        slots=torch.arange(len(texts)),
        seq_lens=newest,
        newest=torch.tensor([text[-1] for text in texts]),
        kv_len=32,
    )
    drafts = drafter.draft(frontier, newest, lambda logits, positions: positions)
    for slot, text in enumerate(texts):
        expected = _search(text)
        assert drafts.counts[slot] == len(expected)
        assert drafts.tokens[slot, : len(expected)].tolist() == expected
    assert drafts.tokens.min() >= 0
