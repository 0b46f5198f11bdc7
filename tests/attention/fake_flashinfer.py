"""FlashInfer's MLA wrapper as far as its plan goes: its contract, on a CPU, with copies put off.

As in FlashInfer, a plan is written into a page-locked block that goes up later, on the stream; a
window reads it on the device, with whatever page list is bound there. Nothing else of a plan
reaches a window, so a block that is written too early, or a length that is wrong, changes the
outcome.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

POISON = 0x5A


class Stream:
    """Work put off until somebody needs it: a window that runs, or an event that is waited for."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []
        self._done = 0

    def put_off(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    @property
    def end(self) -> int:
        return len(self._queue)

    def reach(self, mark: int) -> None:
        while self._done < mark:
            self._queue[self._done]()
            self._done += 1


class StreamEvent:
    """An event on `stream`, which tests put in the place of `Event`."""

    stream = Stream()

    def __init__(self, device: object) -> None:
        self._mark = 0

    def record(self) -> None:
        self._mark = self.stream.end

    def wait(self) -> None:
        self.stream.reach(self._mark)


class FakeModule:
    """What FlashInfer compiles."""

    num_plans = 0

    def plan(
        self, workspace: Tensor, block: Tensor, locked: Tensor, query_starts: Tensor,
        kv_starts: Tensor, kv_lens: Tensor, num_heads: int, rank: int, is_causal: bool,
    ) -> list[int]:  # fmt: skip
        FakeModule.num_plans += 1
        assert is_causal
        parts = (query_starts, kv_starts, kv_lens)
        assert all(part.dtype == torch.int32 and part.is_contiguous() for part in parts)
        rows = kv_lens.numel()
        integers = torch.cat(parts).view(torch.uint8)
        locked[: integers.numel()] = integers

        def arrive() -> None:
            block[: integers.numel()] = locked[: integers.numel()]
            locked.fill_(POISON)

        StreamEvent.stream.put_off(arrive)
        return [rows, num_heads, rank, integers.numel()]


class FakeWrapper:
    """`BatchMLAPagedAttentionWrapper` of 0.5 and 0.6, with fixed buffers."""

    num_wrappers = 0

    def __init__(
        self, workspace: Tensor, *, use_cuda_graph: bool, qo_indptr: Tensor, kv_indptr: Tensor,
        kv_indices: Tensor, kv_len_arr: Tensor, backend: str,
    ) -> None:  # fmt: skip
        assert use_cuda_graph
        assert backend == "auto"
        FakeWrapper.num_wrappers += 1
        self._float_workspace_buffer = workspace
        self._int_workspace_buffer = torch.zeros(8 << 20, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8 << 20, dtype=torch.uint8)
        self._qo_indptr_buf = qo_indptr
        self._kv_indptr_buf = kv_indptr
        self._kv_indices_buf = kv_indices
        self._kv_len_arr_buf = kv_len_arr

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, kv_len_arr: Tensor,
        num_heads: int, head_dim_ckv: int, head_dim_kpe: int, page_size: int, causal: bool,
        sm_scale: float, q_data_type: torch.dtype, kv_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        self._cached_module = FakeModule()
        self._qo_indptr_buf.copy_(qo_indptr)
        self._kv_indptr_buf.copy_(kv_indptr)
        self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        self._kv_len_arr_buf.copy_(kv_len_arr)
        self._page_size, self._scale = page_size, sm_scale
        self._plan_info = self._cached_module.plan(
            self._float_workspace_buffer, self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer, qo_indptr, kv_indptr, kv_len_arr,
            num_heads, head_dim_ckv, causal,
        )  # fmt: skip

    def run(self, q_nope: Tensor, q_pe: Tensor, ckv: Tensor, kpe: Tensor) -> Tensor:
        StreamEvent.stream.reach(StreamEvent.stream.end)
        rows, num_heads, rank, num_bytes = self._plan_info
        assert q_nope.shape[1:] == (num_heads, rank)
        integers = self._int_workspace_buffer[:num_bytes].view(torch.int32).tolist()
        query_starts, rest = integers[: rows + 1], integers[rows + 1 :]
        kv_starts, kv_lens = rest[: rows + 1], rest[rows + 1 :]
        q = torch.cat([q_nope, q_pe], dim=-1)
        out = torch.empty_like(q_nope)
        for row in range(rows):
            own = slice(query_starts[row], query_starts[row + 1])
            out[own] = self._row(q[own], ckv, kpe, kv_starts[row], kv_lens[row])
        return out

    def _row(self, q: Tensor, ckv: Tensor, kpe: Tensor, start: int, kv_len: int) -> Tensor:
        num_pages = -(-kv_len // self._page_size)
        pages = self._kv_indices_buf[start : start + num_pages].long()
        latents = ckv[pages].flatten(0, 1)[:kv_len]
        keys = torch.cat([latents, kpe[pages].flatten(0, 1)[:kv_len]], dim=-1)
        scores = torch.einsum("whc,sc->whs", q, keys) * self._scale
        width = q.shape[0]
        is_seen = torch.ones(width, kv_len, dtype=torch.bool).tril(kv_len - width)
        weights = scores.masked_fill(~is_seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("whs,sr->whr", weights, latents)


def fake_backend(
    monkeypatch: Any, *, page_size: int, max_len: int, max_rows: int, spec: Any, dtype: torch.dtype
) -> Any:
    """Make the backend over the fake, all else planned by the reference."""
    from gapless.attention import flashinfer
    from gapless.attention.reference import ReferenceAttention

    StreamEvent.stream = Stream()
    monkeypatch.setattr(flashinfer, "Event", StreamEvent)
    monkeypatch.setattr(flashinfer, "FLOAT_WORKSPACE_BYTES", 64)
    monkeypatch.setattr(flashinfer, "INT_WORKSPACE_BYTES", 4096)
    return flashinfer.FlashInferAttention(
        page_size=page_size, max_len=max_len, max_rows=max_rows, device="cpu", spec=spec,
        dtype=dtype, wrapper_class=FakeWrapper,
        on_device=ReferenceAttention(
            page_size=page_size, max_len=max_len, device="cpu", layers=[spec], dtype="float64"
        ),
    )  # fmt: skip
