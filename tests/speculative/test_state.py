"""After any history of accepted and rejected drafts, all state is that of a fresh prefill."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from gapless import LLM, SamplingParams
from gapless.core.specs.linear import L2NORM_EPS
from gapless.layers.batch import LinearMemory
from gapless.ops.linear_replay import materialize
from gapless.speculative.mtp import MtpDrafter
from tests.engine_fixtures import runner_of

if TYPE_CHECKING:
    from gapless.runner.device import Device

OPTIONS: dict[str, Any] = {"max_running_requests": 2, "max_model_len": 128, "dtype": "float64"}
TREES = [
    {"speculative_topk": 4, "speculative_num_draft_tokens": 16},
    {"speculative_topk": 2, "speculative_num_draft_tokens": 6},
    {"speculative_topk": 3, "speculative_num_draft_tokens": 12},
]
QUESTION = [{"role": "user", "content": "Bob has 3 cats and each cat eats 4 fish. How many fish?"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def _device(llm: LLM) -> Device:
    return runner_of(llm).device


def _kv(device: Device, pool: Tensor, slot: int, first: int, end: int) -> Tensor:
    positions = torch.arange(first, end)
    size = device.geometry.page_size
    pages = device.table.columns.page_table[slot, positions // size]
    return pool[pages * size + positions % size]


def _state_at(device: Device, memory: LinearMemory, slot: int, position: int) -> Tensor:
    """Materialize a slot's state at a position into the null row."""
    geometry, columns = device.geometry, device.table.columns
    start = int(columns.checkpoint_len[slot])
    replayed = torch.arange(start, start + geometry.num_replayed)
    row = int(columns.state_rows[slot]) if start else geometry.zero_row
    materialize(
        memory.replay,
        (slot * geometry.ring_len + replayed % geometry.ring_len)[None],
        (replayed < position)[None],
        read_rows=torch.tensor([row]),
        out_rows=torch.tensor([geometry.null_row]),
        l2norm_eps=L2NORM_EPS,
    )
    return memory.replay.checkpoint[geometry.null_row].clone()


def _conv_tail(device: Device, memory: LinearMemory, slot: int, position: int) -> Tensor:
    size, width = device.geometry.conv_ring_len, device.geometry.conv_width
    positions = torch.arange(max(0, position - width + 1), position)
    return memory.conv_ring[slot * size + positions % size].clone()


def _close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-9


@cache
def answer() -> tuple[int, ...]:
    """Tokens that follow the question, without drafts."""
    return LLM(speculative_num_steps=0, **OPTIONS).generate(QUESTION, GREEDY).token_ids


@pytest.mark.parametrize(
    ("num_drafts", "replay_len", "tree"),
    [
        *[(3, 16, {}), (5, 3, {}), (2, 1, {}), (3, 4, TREES[0])],
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((3, 4, {}), (7, 8, {}), (2, 3, TREES[1]), (5, 8, TREES[2]))
        ],
    ],
)
def test_state_is_that_of_a_fresh_prefill(
    num_drafts: int, replay_len: int, tree: dict[str, int]
) -> None:
    options = {**OPTIONS, "linear_replayssm_cache_len": replay_len, **tree}
    spec = LLM(speculative_num_steps=num_drafts, **options)
    prompt = spec.encode(QUESTION)
    tokens = [*prompt, *answer()]
    stream = spec.stream(prompt, GREEDY)
    device, slot = _device(spec), 0
    for _ in range(3):
        # the state after one step is seen in that of the next
        next(stream)
        next(stream)
        position = int(device.table.columns.seq_lens[slot])
        fresh = LLM(speculative_num_steps=num_drafts, **options)
        fresh.generate(tokens[:position], SamplingParams(temperature=0.0, max_tokens=1))
        _compare(device, _device(fresh), slot, position)
    stream.close()


def _compare(device: Device, fresh: Device, slot: int, position: int) -> None:
    assert int(fresh.table.columns.checkpoint_len[slot]) == position
    for own, other in zip(device.memory, fresh.memory, strict=True):
        if isinstance(own, LinearMemory):
            assert isinstance(other, LinearMemory)
            row = fresh.table.columns.state_rows[slot]
            _close(_state_at(device, own, slot, position), other.replay.checkpoint[row])
            _close(
                _conv_tail(device, own, slot, position), _conv_tail(fresh, other, slot, position)
            )
        else:
            _close(_kv(device, own, slot, 0, position), _kv(fresh, other, slot, 0, position))
    assert isinstance(device.drafter, MtpDrafter)
    assert isinstance(fresh.drafter, MtpDrafter)
    for own, other in zip(device.drafter._memory, fresh.drafter._memory, strict=True):
        assert isinstance(own, Tensor)
        assert isinstance(other, Tensor)
        _close(_kv(device, own, slot, 1, position + 1), _kv(fresh, other, slot, 1, position + 1))


def test_no_tensor_holds_state_per_draft() -> None:
    plain, spec = LLM(speculative_num_steps=0, **OPTIONS), LLM(speculative_num_steps=3, **OPTIONS)
    for own, other in zip(_device(plain).memory, _device(spec).memory, strict=True):
        if isinstance(own, LinearMemory):
            assert isinstance(other, LinearMemory)
            # the checkpoint pool does not grow with drafts; the rings do, by two entries a draft
            assert own.replay.checkpoint.shape == other.replay.checkpoint.shape
            slots = _device(plain).geometry.num_slots + 1
            for ring, wider in (
                (own.replay.d_ring, other.replay.d_ring),
                (own.replay.k_ring, other.replay.k_ring),
                (own.replay.g_ring, other.replay.g_ring),
            ):
                assert wider.shape[0] - ring.shape[0] == slots * 2 * 3
            assert other.conv_ring.shape[0] - own.conv_ring.shape[0] == slots * 3
        else:
            assert isinstance(other, Tensor)
            # no more per token; the pool has pages for what drafts reach past the limit
            assert own.shape[1:] == other.shape[1:]


Extend = Callable[..., Tensor]


def test_planted_extend_skipped_once_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Extend = MtpDrafter.read_window
    calls: list[None] = []

    def skips_third(self: MtpDrafter, outcome: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 3:
            return outcome.hidden[:: outcome.tokens.shape[1]]
        return honest(self, outcome)

    monkeypatch.setattr(MtpDrafter, "read_window", skips_third)
    with pytest.raises(AssertionError):
        test_state_is_that_of_a_fresh_prefill(3, 16, {})
