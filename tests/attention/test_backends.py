"""Every attention backend against the reference in float64, and which one serves what."""

from __future__ import annotations

import logging
import os

import pytest
import torch

from gapless.attention.backend import BACKENDS, AttentionBackend, choose_backend, make_backend
from gapless.core.specs.attention import AttentionSpec, LatentSpec, PagedSpec
from gapless.errors import BackendUnavailable

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

PAGE_SIZE, NUM_PAGES, COLUMNS = 16, 40, 12
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
RANK, ROPE_DIM = 24, 8
LENGTHS, WIDTH = (3, 17, 140), 2  # committed


def full(head_dim: int) -> AttentionSpec:
    return AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=head_dim,
        rotary_dim=head_dim,
        rope_theta=1e4,
        has_qk_norm=False,
        has_output_gate=False,
    )


def latent(rank: int, rope_dim: int) -> LatentSpec:
    return LatentSpec(
        num_heads=HEADS,
        q_lora_rank=0,
        kv_lora_rank=rank,
        nope_dim=16,
        rope_dim=rope_dim,
        value_dim=16,
        scale=0.3,
        rotary=None,
    )


LAYERS = [full(HEAD_DIM), latent(RANK, ROPE_DIM)]


def make(name: str, device: str = DEVICE) -> AttentionBackend:
    if name == "triton":
        from gapless.attention.triton import TritonAttention

        return TritonAttention(
            page_size=PAGE_SIZE,
            max_len=COLUMNS * PAGE_SIZE,
            device=device,
            layers=LAYERS,
            dtype="float32",
        )
    return make_backend(
        name,
        page_size=PAGE_SIZE,
        max_len=COLUMNS * PAGE_SIZE,
        max_rows=len(LENGTHS) + 1,
        device=device,
        layers=LAYERS,
        dtype="float32",
    )


@pytest.fixture
def table() -> torch.Tensor:
    pages = torch.randperm(NUM_PAGES)[: len(LENGTHS) * COLUMNS].view(-1, COLUMNS)
    return torch.cat([pages, torch.full((1, COLUMNS), NUM_PAGES)])


@pytest.fixture
def pool() -> torch.Tensor:
    pool = torch.randn((NUM_PAGES + 1) * PAGE_SIZE, 2, KV_HEADS, HEAD_DIM)
    pool[NUM_PAGES * PAGE_SIZE :] = float("nan")
    return pool


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", BACKENDS)
def test_window(name: str, first: int, table: torch.Tensor, pool: torch.Tensor) -> None:
    slots = torch.tensor([2, 0, 1, 3])
    lengths = torch.tensor([*(LENGTHS[slot] for slot in slots[:3]), 0])
    positions = lengths[:, None] + torch.arange(WIDTH)
    q = torch.randn(slots.numel() * WIDTH, HEADS, HEAD_DIM)

    def run(name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
        indices = (x.to(device) for x in (slots, positions, table))
        plan = make(name, device).plan_window(*indices, kv_len=192, first=first)
        return plan.run(q.to(device, dtype), pool.to(device, dtype), 0.3).cpu()

    wanted = run("reference", torch.float64, "cpu")[: 3 * WIDTH]
    found = run(name, torch.float32, DEVICE)[: 3 * WIDTH]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_prefill(name: str, pool: torch.Tensor) -> None:
    sizes = [(20, 20), (3, 70), (1, 1)]  # queries, keys
    segments, q_start, kv_start = [], 0, 0
    for queries, keys in sizes:
        segments.append((q_start, q_start + queries, kv_start, kv_start + keys))
        q_start, kv_start = q_start + queries, kv_start + keys
    kv_read = torch.randperm(NUM_PAGES * PAGE_SIZE)[:kv_start]
    q = torch.randn(q_start, HEADS, HEAD_DIM)

    def run(name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
        plan = make(name, device).plan_prefill(kv_read.to(device), tuple(segments))
        layers = [plan.run(q.to(device, dtype), pool.to(device, dtype), 0.3) for _ in range(2)]
        assert torch.equal(*layers)
        return layers[0].cpu()

    wanted = run("reference", torch.float64, "cpu")
    found = run(name, torch.float32, DEVICE)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.fixture
def latents() -> torch.Tensor:
    latents = torch.randn((NUM_PAGES + 1) * PAGE_SIZE, RANK + ROPE_DIM)
    latents[NUM_PAGES * PAGE_SIZE :] = float("nan")
    return latents


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("name", BACKENDS)
def test_latent_window(name: str, first: int, table: torch.Tensor, latents: torch.Tensor) -> None:
    slots = torch.tensor([2, 0, 1, 3])
    lengths = torch.tensor([*(LENGTHS[slot] for slot in slots[:3]), 0])
    positions = lengths[:, None] + torch.arange(WIDTH)
    q = torch.randn(slots.numel() * WIDTH, HEADS, RANK + ROPE_DIM)

    def run(name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
        indices = (x.to(device) for x in (slots, positions, table))
        plan = make(name, device).plan_window(*indices, kv_len=192, first=first)
        moved = q.to(device, dtype), latents.to(device, dtype)
        return plan.run_latent(*moved, 0.3, value_dim=RANK).cpu()

    wanted = run("reference", torch.float64, "cpu")[: 3 * WIDTH]
    found = run(name, torch.float32, DEVICE)[: 3 * WIDTH]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_latent_prefill(name: str, latents: torch.Tensor) -> None:
    segments = ((0, 20, 0, 20), (20, 23, 20, 90), (23, 24, 90, 91))
    kv_read = torch.randperm(NUM_PAGES * PAGE_SIZE)[:91]
    q = torch.randn(24, HEADS, RANK + ROPE_DIM)

    def run(name: str, dtype: torch.dtype, device: str) -> torch.Tensor:
        plan = make(name, device).plan_prefill(kv_read.to(device), segments)
        moved = q.to(device, dtype), latents.to(device, dtype)
        layers = [plan.run_latent(*moved, 0.3, value_dim=RANK) for _ in range(2)]
        assert torch.equal(*layers)
        return layers[0].cpu()

    wanted = run("reference", torch.float64, "cpu")
    found = run(name, torch.float32, DEVICE)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_prefill_in_a_room(name: str, pool: torch.Tensor, latents: torch.Tensor) -> None:
    """Tiles that came with the chunk, some empty, and queries of no segment, which are NaN."""
    segments = ((0, 20, 0, 20), (20, 23, 20, 90), (23, 24, 90, 91))
    kv_read = torch.randperm(NUM_PAGES * PAGE_SIZE)[:91].to(DEVICE)
    backend = make(name)
    arrays = backend.prefill_tiles(segments, (40, 5))
    shapes = {size: array.shape for size, array in arrays.items()}
    assert shapes == {s: a.shape for s, a in backend.prefill_tiles((), (40, 5)).items()}
    tiles = {size: torch.from_numpy(array).to(DEVICE) for size, array in arrays.items()}
    exact = backend.plan_prefill(kv_read, segments)
    padded = backend.plan_prefill(kv_read, segments, tiles)
    spare = torch.full((16, HEADS, HEAD_DIM), float("nan"))
    q = torch.randn(24, HEADS, HEAD_DIM)
    kv = pool.to(DEVICE)
    found = padded.run(torch.cat([q, spare]).to(DEVICE), kv, 0.3)
    assert torch.equal(found[:24], exact.run(q.to(DEVICE), kv, 0.3))
    q, entries = q[..., : RANK + ROPE_DIM].contiguous(), latents.to(DEVICE)
    found = padded.run_latent(
        torch.cat([q, spare[..., : RANK + ROPE_DIM]]).to(DEVICE), entries, 0.3, value_dim=RANK
    )
    assert torch.equal(found[:24], exact.run_latent(q.to(DEVICE), entries, 0.3, value_dim=RANK))


def test_tiles_that_were_not_laid_out_are_not_sent_later(pool: torch.Tensor) -> None:
    """A captured chunk would read the first chunk's for ever."""
    plan = make("triton").plan_prefill(torch.arange(4, device=DEVICE), ((0, 4, 0, 4),), {})
    with pytest.raises(AssertionError, match="no tiles of"):
        plan.run(torch.randn(4, HEADS, HEAD_DIM, device=DEVICE), pool.to(DEVICE), 0.3)


@pytest.mark.parametrize(
    ("device", "layers", "dtype", "chosen", "reason"),
    [
        ("cpu", [full(64)], "float32", "reference", "device cpu"),
        ("cuda", [full(64), full(256)], "bfloat16", "triton", "device cuda"),
        ("cuda:1", [full(128)], "float32", "triton", "device cuda:1"),
        ("cuda", [full(64), full(80)], "bfloat16", "reference", "head_dim 80"),
        ("cuda", [full(64)], "float64", "reference", "dtype float64"),
        ("cuda", [latent(512, 64)], "bfloat16", "triton", "device cuda"),
        ("cuda", [full(128), latent(36, 16)], "float32", "triton", "device cuda"),
        # an entry as wide as a head that is served
        ("cuda", [latent(128, 128)], "bfloat16", "reference", "rope_dim 128"),
        ("cuda", [full(64), latent(960, 64)], "bfloat16", "reference", "kv_lora_rank 960"),
    ],
)
def test_automatic_choice_is_logged(
    caplog: pytest.LogCaptureFixture,
    device: str,
    layers: list[PagedSpec],
    dtype: str,
    chosen: str,
    reason: str,
) -> None:
    with caplog.at_level(logging.INFO, logger="gapless"):
        assert choose_backend("auto", device=device, layers=layers, dtype=dtype) == chosen
    (message,) = caplog.messages
    assert f"attention backend = {chosen}" in message
    assert reason in message


def test_backend_that_cannot_serve_is_an_error() -> None:
    with pytest.raises(BackendUnavailable, match=r"=triton on device cpu \(want cuda\).*reference"):
        choose_backend("triton", device="cpu", layers=[full(64)], dtype="float32")
    with pytest.raises(BackendUnavailable, match="head_dim 48"):
        choose_backend("triton", device="cuda", layers=[full(48)], dtype="bfloat16")
    assert choose_backend("reference", device="cuda", layers=[full(48)], dtype="x") == "reference"
