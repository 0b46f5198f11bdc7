"""Host-made plans of FlashInfer's latent attention, over a fake that keeps its plan's contract."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from gapless.attention import backend as choice
from gapless.attention import flashinfer, measured
from gapless.attention.backend import choose_backend
from gapless.attention.reference import ReferenceAttention
from gapless.config.options import EngineOptions
from gapless.core.specs.attention import LatentSpec
from gapless.errors import BackendUnavailable, ConfigError
from gapless.ops.draft_tree import TreeMask
from gapless.runner.syncs import forbid_syncs
from tests.attention.fake_flashinfer import FakeModule, FakeWrapper, StreamEvent, fake_backend

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PAGE_SIZE, COLUMNS, NUM_PAGES, NUM_SLOTS = 4, 8, 40, 4
MAX_LEN = PAGE_SIZE * COLUMNS
HEADS, RANK, ROPE = 4, 12, 6
SPEC = LatentSpec(
    num_heads=HEADS, q_lora_rank=0, kv_lora_rank=RANK, nope_dim=8, rope_dim=ROPE, value_dim=8,
    scale=0.3, rotary=None,
)  # fmt: skip
SERVED = replace(SPEC, kv_lora_rank=512, rope_dim=64, num_heads=16)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> flashinfer.FlashInferAttention:
    made: flashinfer.FlashInferAttention = fake_backend(
        monkeypatch, page_size=PAGE_SIZE, max_len=MAX_LEN, max_rows=NUM_SLOTS, spec=SPEC,
        dtype=torch.float64,
    )  # fmt: skip
    return made


def make_reference() -> ReferenceAttention:
    return ReferenceAttention(
        page_size=PAGE_SIZE, max_len=MAX_LEN, device="cpu", layers=[SPEC], dtype="float64"
    )


class Memory:
    """Pages of some slots, NaN wherever nothing may be read."""

    def __init__(self) -> None:
        pages = torch.randperm(NUM_PAGES)[: NUM_SLOTS * COLUMNS].view(-1, COLUMNS)
        self.table = torch.cat([pages, torch.full((1, COLUMNS), NUM_PAGES)])
        shape = (NUM_PAGES + 1) * PAGE_SIZE, RANK + ROPE
        self.pool = torch.randn(shape, dtype=torch.float64)
        self.pool[NUM_PAGES * PAGE_SIZE :] = float("nan")

    def run(
        self, backend: Any, slots: list[int], ends: list[int], width: int, first: int,
        plan: str | None, q: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        positions = torch.tensor(ends)[:, None] + torch.arange(-width, 0)
        more = {} if plan is None else {"host_plan": plan}
        window = backend.plan_window(
            torch.tensor(slots), positions, self.table, kv_len=24, first=first, **more
        )
        return window.run_latent(q, self.pool, 0.3, value_dim=RANK)


def _queries(rows: int, width: int) -> torch.Tensor:
    return torch.randn(rows * width, HEADS, RANK + ROPE, dtype=torch.float64)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("width", [1, 3])
def test_windows_of_many_steps(
    backend: flashinfer.FlashInferAttention, first: int, width: int
) -> None:
    memory = Memory()
    reference = make_reference()
    ends = np.array([5, 9, 17])
    wrappers = FakeWrapper.num_wrappers
    for step in range(12):
        slots = [[2, 0, 1], [0, 3, 2]][step % 2]
        q = _queries(3, width)
        with forbid_syncs():
            backend.plan_host("verify", ends, width=width, kv_len=24, first=first)
        found = memory.run(backend, slots, ends.tolist(), width, first, "verify", q)
        wanted = memory.run(reference, slots, ends.tolist(), width, first, None, q)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        ends = ends + np.array([1, step % 2, 0])
    assert FakeWrapper.num_wrappers == wrappers + 1, "one wrapper serves all steps"


def test_plans_of_several_windows_wait_in_the_ring(
    backend: flashinfer.FlashInferAttention,
) -> None:
    """All plans of a step, and of the next one, are made before any has gone up."""
    memory = Memory()
    reference = make_reference()
    names = [f"draft {depth}" for depth in range(2 * flashinfer.RING_LEN + 3)]
    lengths = [np.array([3 + i, 20 - i]) for i in range(len(names))]
    for _ in range(2):
        for name, ends in zip(names, lengths, strict=True):
            backend.plan_host(name, ends, width=1, kv_len=24)
    q = _queries(2, 1)
    for name, ends in zip(names, lengths, strict=True):
        found = memory.run(backend, [1, 0], ends.tolist(), 1, 0, name, q)
        wanted = memory.run(reference, [1, 0], ends.tolist(), 1, 0, None, q)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_ring_that_is_not_waited_for_is_seen(
    backend: flashinfer.FlashInferAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamEvent, "wait", lambda self: None)
    with pytest.raises((AssertionError, RuntimeError)):
        test_plans_of_several_windows_wait_in_the_ring(backend)


def test_the_wrapper_plans_once_and_its_buffers_follow(
    backend: flashinfer.FlashInferAttention, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock: list[str] = []
    honest = FakeWrapper.plan

    def counted(self: Any, *args: Any) -> None:
        stock.append("plan")
        honest(self, *args)

    monkeypatch.setattr(FakeWrapper, "plan", counted)
    before = FakeModule.num_plans
    for end in (4, 6, 9):
        backend.plan_host("verify", np.array([end, 12]), width=2, kv_len=24)
    backend.plan_host("verify", np.array([9, 12]), width=2, kv_len=MAX_LEN)
    assert len(stock) == 1
    assert FakeModule.num_plans - before == 4
    wrapper = backend._windows["verify", 2, 2, 0].wrapper
    assert wrapper._kv_len_arr_buf.tolist() == [9, 12]
    assert wrapper._kv_indptr_buf.tolist() == [0, COLUMNS, 2 * COLUMNS]
    assert wrapper._qo_indptr_buf.tolist() == [0, 2, 4]


def test_what_the_host_has_not_planned_is_planned_on_the_device(
    backend: flashinfer.FlashInferAttention,
) -> None:
    memory = Memory()
    reference = make_reference()
    q, before = _queries(2, 1), FakeModule.num_plans
    found = memory.run(backend, [1, 0], [5, 9], 1, 1, None, q)
    assert torch.equal(found, memory.run(reference, [1, 0], [5, 9], 1, 1, None, q))
    segments = ((0, 2, 0, 6),)
    kv_read = torch.arange(6)
    chunks = [
        b.plan_prefill(kv_read, segments).run_latent(q, memory.pool, 0.3, value_dim=RANK)
        for b in (backend, reference)
    ]
    assert torch.equal(*chunks)
    assert FakeModule.num_plans == before


def test_trees_are_refused(backend: flashinfer.FlashInferAttention) -> None:
    table = Memory().table
    mask = TreeMask(torch.tensor([4]), torch.tensor([[1, 3]]))
    backend.plan_host("verify", np.array([6]), width=2, kv_len=24)
    with pytest.raises(NotImplementedError, match="chains only"):
        backend.plan_window(
            torch.tensor([0]), torch.tensor([[4, 5]]), table, kv_len=24, tree=mask,
            host_plan="verify",
        )  # fmt: skip
    with pytest.raises(NotImplementedError, match="chains only"):
        backend.update_verify_buffers_to_fill_after_draft("verify")


def _installed(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(flashinfer.importlib.metadata, "version", lambda name: version)


@pytest.mark.parametrize(
    ("layers", "dtype", "version", "reason"),
    [
        ([SERVED], "bfloat16", "0.5.3", None),
        ([SERVED, SERVED], "bfloat16", "0.6.18.post1", None),
        ([replace(SERVED, num_heads=128)], "bfloat16", "0.6.0rc1", None),
        ([SERVED], "bfloat16", "0.7.4", r"flashinfer-python 0\.7\.4 \(want"),
        ([SERVED], "bfloat16", "0.4.1", r"0\.4\.1"),
        ([SERVED], "float32", "0.5.3", "dtype float32"),
        ([replace(SERVED, kv_lora_rank=256)], "bfloat16", "0.5.3", r"256 \+ 64 channels"),
        ([replace(SERVED, num_heads=20)], "bfloat16", "0.5.3", "20 heads"),
        ([SERVED, replace(SERVED, scale=0.5)], "bfloat16", "0.5.3", "scales"),
        ([], "bfloat16", "0.5.3", "latent attention alone"),
    ],
)
def test_what_is_served(
    monkeypatch: pytest.MonkeyPatch, layers: Any, dtype: str, version: str, reason: str | None
) -> None:
    _installed(monkeypatch, version)
    if reason is None:
        asked = choose_backend("flashinfer", device="cuda", layers=layers, dtype=dtype)
        assert asked == "flashinfer"
        return
    with pytest.raises(BackendUnavailable, match=rf"=flashinfer on .*{reason}.*use attention"):
        choose_backend("flashinfer", device="cuda", layers=layers, dtype=dtype)


def test_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: dict[str, Any] = {"layers": [SERVED], "dtype": "bfloat16"}
    with pytest.raises(BackendUnavailable, match=r"device cpu \(want cuda\)"):
        choose_backend("flashinfer", device="cpu", **arguments)
    monkeypatch.setattr(flashinfer.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install gapless\[flashinfer\]"):
        choose_backend("flashinfer", device="cuda", **arguments)
    _installed(monkeypatch, "0.5.3")
    with pytest.raises(BackendUnavailable, match="draft trees"):
        choose_backend("flashinfer", device="cuda", has_tree=True, **arguments)


@pytest.mark.parametrize(
    ("host", "chosen"),
    [({1: 110.0, 8: 900.0}, "flashinfer"), ({1: 110.0, 8: 700.0}, "triton"), (None, "triton")],
)
def test_the_automatic_choice_follows_a_measurement(
    monkeypatch: pytest.MonkeyPatch, host: dict[int, float] | None, chosen: str
) -> None:
    _installed(monkeypatch, "0.5.3")
    monkeypatch.setattr(choice.torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    figures = {} if host is None else {"flashinfer": host, "triton": {1: 100.0, 8: 800.0}}
    known = {"H200": figures} if figures else {}
    monkeypatch.setattr(measured, "TOKENS_PER_SECOND", known)
    found = choose_backend("auto", device="cuda", layers=[SERVED], dtype="bfloat16")
    assert found == chosen


@pytest.mark.parametrize("name", measured.TOKENS_PER_SECOND)
def test_what_is_known_of_a_gpu_stands_in_its_newest_file(name: str) -> None:
    files = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("*-host-planned.json"))]
    newest = [file["kinds"] for file in files if name in file["gpu"]][-1]
    found = {
        backend: {one["batch"]: one["tokens_per_second"] for one in newest[kind]["figures"]}
        for backend, kind in (("flashinfer", "host"), ("triton", "triton"))
    }
    assert measured.TOKENS_PER_SECOND[name] == {
        backend: pytest.approx(figures, abs=0.05) for backend, figures in found.items()
    }


def test_an_h200_plans_on_the_device() -> None:
    assert measured.faster_for_latents("NVIDIA H200") == "triton"


def test_context_parallelism_is_refused() -> None:
    with pytest.raises(ConfigError, match="dcp_size=2: positions of a request are not divided"):
        EngineOptions.from_dict({"dcp_size": 2})
