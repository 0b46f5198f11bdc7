"""`reference.py` on a GPU: routing in one launch, few pairs in two, many in four, no sync.

A pair is one token with one of its experts. Products accumulate in float32; hidden features are
rounded to the activation dtype, and so are the terms of very many pairs. Kernels are compiled for
a few ranges of pairs, not for each number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from gapless.ops.chaining import chained
from gapless.ops.moe.gathered_kernels import _gathered_down_kernel, _gathered_up_kernel
from gapless.ops.moe.grouped_kernels import (
    _combine_kernel,
    _grouped_down_kernel,
    _grouped_up_kernel,
    _sort_kernel,
)
from gapless.ops.moe.route_kernel import _route_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from gapless.ops.moe import Shared

# pairs up to which few enough share an expert that reading its matrices for each costs least
GATHERED_PAIRS = 64
SORT_BLOCKS = (512, 2048)  # pairs that the sort reads at a time, few and many
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Tiling:
    """How a grouped product is cut into programs."""

    block_m: int  # pairs
    block_up: int  # hidden features: each has a gate and an up
    block_down: int  # output features
    block_k: int  # features summed per iteration
    num_warps: int
    num_stages: int

    def terms_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return float32 for terms so few that keeping them as they are costs little."""
        return torch.float32 if self.block_m == 16 else dtype


@dataclass(frozen=True)
class GatheredTiling:
    """How the products of few pairs are cut into programs."""

    block_up: int  # hidden features of a pair: each has a gate and an up
    block_k: int  # features summed per iteration
    up_warps: int
    up_stages: int  # iterations in flight; 1 loads each when its turn comes
    block_down: int  # output features of a token
    down_warps: int


@dataclass(frozen=True)
class Groups:
    """Experts in groups of equal size, in order, of which a token's best ones are open to it."""

    number: int = 1
    number_open: int = 1


# chosen with `python -m benchmarks.gpu.experts --gathered-sweep`
GATHERED = GatheredTiling(4, 1024, 4, 1, 4, 8)


def grouped_tiling(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiling:
    """Choose by how many pairs an expert has on average."""
    if dtype is torch.float32:
        return Tiling(16, 32, 32, 32, 4, 2)
    mean = num_pairs / num_experts
    if mean <= 8:
        return Tiling(16, 32, 64, 128, 4, 4)
    if mean <= 64:
        return Tiling(64, 64, 128, 64, 4, 3)
    return Tiling(128, 64, 128, 64, 8, 3)


def unsupported_logits(logits: Tensor) -> str | None:
    """Return why the router's kernel cannot serve these logits, None if it can."""
    return None if logits.dtype in _DTYPES else f"logits of {logits.dtype}"


def unsupported_mix(x: Tensor, weights: Tensor) -> str | None:
    """Return why the kernels cannot serve these inputs, None if they can."""
    if x.dtype not in _DTYPES or weights.dtype is not torch.float32:
        return f"activations of {x.dtype} with weights of {weights.dtype}"
    return None


def route(
    logits: Tensor,
    num_active: int,
    *,
    renormalises: bool,
    bias: Tensor | None = None,  # [E] float32: scores are sigmoids, chosen with it, not a softmax
    groups: Groups = Groups(),
    scale: float = 1.0,
    sum_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """See `reference.route`, and `route_in_groups` of `ops.group_routing` for bias and groups.

    Rows of `logits` may be strided.
    """
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1, "a token's logits are contiguous"
    shape = (num_tokens, num_active)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    experts = torch.empty(shape, dtype=torch.int64, device=logits.device)
    if num_tokens:
        _route_kernel[(num_tokens,)](
            logits,
            logits if bias is None else bias,
            weights,
            experts,
            logits.stride(0),
            scale,
            sum_eps,
            K=num_active,
            GROUPS=groups.number,
            GROUP_SIZE=num_experts // groups.number,
            OPEN_GROUPS=groups.number_open,
            BLOCK_G=triton.next_power_of_2(groups.number),
            BLOCK_E=triton.next_power_of_2(num_experts // groups.number),
            IS_BIASED_SIGMOID=bias is not None,
            HAS_RENORM=renormalises,
            num_warps=1 if num_experts <= 512 else 4,
            **chained(logits),
        )
    return weights, experts


def mix_experts(
    x: Tensor,  # [T, D], rows may be strided
    weights: Tensor,  # [T, k] float32
    experts: Tensor,  # [T, k] int64
    gate_up: Tensor,  # [E, 2 I, D], gate first, or without gates [E, I, D]
    down: Tensor,  # [E, D, I]
    *,
    live: Tensor | None = None,  # [T] bool
    extra: tuple[Tensor, Tensor | None] | None = None,  # [T, D], [T, 1]; with many pairs
    shared: Shared | None = None,  # with few
) -> Tensor:  # [T, D] in x's dtype
    """See `mix_experts` of the package."""
    if gathers(experts):
        assert extra is None, "a shared expert runs with gathered pairs"
        return mix_gathered(x, weights, experts, gate_up, down, live=live, shared=shared)
    assert shared is None, "a shared expert runs before grouped pairs"
    return mix_grouped(x, weights, experts, gate_up, down, live=live, extra=extra)


def gathers(experts: Tensor) -> bool:
    """Return whether every pair reads its expert's matrices."""
    return experts.numel() <= GATHERED_PAIRS


def mix_gathered(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    live: Tensor | None = None,
    shared: Shared | None = None,
    tiling: GatheredTiling = GATHERED,
) -> Tensor:
    """`mix_experts` as products with vectors: each pair reads its expert's matrices."""
    _assert_layout(x, weights, experts, gate_up, down)
    num_tokens, num_active = experts.shape
    _, size, inner = down.shape
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    num_shared = 0
    shared_up, shared_down, shared_gate = gate_up, down, None
    if shared is not None:
        shared_up, shared_down, shared_gate = shared
        num_shared = shared_down.shape[1]
        assert shared_up.is_contiguous(), "the shared expert's matrices are contiguous"
        assert shared_down.is_contiguous(), "the shared expert's matrices are contiguous"
        assert shared_up.shape[0] == num_parts(gate_up, down) * num_shared, "it is an expert's like"
    width = num_active * inner + num_shared
    hidden = torch.empty(num_tokens, width, dtype=x.dtype, device=x.device)
    alive, has_live = _alive(live, experts)
    block_up = min(tiling.block_up, triton.next_power_of_2(inner))
    num_parallel = num_active + triton.cdiv(num_shared, inner)
    _gathered_up_kernel[num_tokens * num_parallel, triton.cdiv(inner, block_up)](
        x,
        experts,
        alive,
        gate_up,
        shared_up,
        hidden,
        x.stride(0),
        D=size,
        INNER=inner,
        K=num_active,
        SHARED=num_shared,
        BLOCK_I=block_up,
        BLOCK_D=min(tiling.block_k, triton.next_power_of_2(size)),
        STAGES=tiling.up_stages,
        NUM_PARTS=num_parts(gate_up, down),
        HAS_LIVE=has_live,
        num_warps=tiling.up_warps,
        **chained(x),
    )
    block_active = triton.next_power_of_2(num_active)
    gate = out if shared_gate is None else shared_gate
    _gathered_down_kernel[num_tokens, triton.cdiv(size, tiling.block_down)](
        hidden,
        weights,
        experts,
        alive,
        down,
        shared_down,
        gate,
        out,
        gate.stride(0),
        D=size,
        INNER=inner,
        K=num_active,
        SHARED=num_shared,
        BLOCK_K=block_active,
        # as much as registers hold: all of a token's experts are loaded together
        BLOCK_I=min(4096 // block_active, triton.next_power_of_2(inner)),
        BLOCK_D=tiling.block_down,
        BLOCK_S=min(1024, triton.next_power_of_2(num_shared)) if num_shared else 1,
        HAS_LIVE=has_live,
        HAS_GATE=shared_gate is not None,
        num_warps=tiling.down_warps,
        **chained(x),
    )
    return out


def mix_grouped(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    live: Tensor | None = None,
    extra: tuple[Tensor, Tensor | None] | None = None,
    tiling: Tiling | None = None,
) -> Tensor:
    """`mix_experts` as matrix products over tiles of pairs that share an expert."""
    _assert_layout(x, weights, experts, gate_up, down)
    num_tokens, num_active = experts.shape
    num_experts, size, inner = down.shape
    num_pairs = experts.numel()
    out = torch.empty(num_tokens, size, dtype=x.dtype, device=x.device)
    if not num_tokens:
        return out
    tiling = tiling or grouped_tiling(num_pairs, num_experts, x.dtype)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=x.device)
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    hidden = torch.empty(num_pairs, inner, dtype=x.dtype, device=x.device)
    terms = torch.empty(num_pairs, size, dtype=tiling.terms_dtype(x.dtype), device=x.device)
    alive, has_live = _alive(live, experts)
    _sort_kernel[(num_experts,)](
        experts,
        alive,
        starts,
        order,
        num_pairs,
        K=num_active,
        BLOCK=SORT_BLOCKS[num_pairs > SORT_BLOCKS[0]],
        HAS_LIVE=has_live,
        num_warps=4,
        **chained(x),
    )
    # every expert may leave one tile partly filled
    num_tiles = num_pairs // tiling.block_m + min(num_experts, num_pairs)
    sizes: dict[str, Any] = {
        "D": size,
        "INNER": inner,
        "E": num_experts,
        "BLOCK_E": triton.next_power_of_2(num_experts),
        "BLOCK_M": tiling.block_m,
        "BLOCK_K": tiling.block_k,
        "PRECISION": "ieee" if x.dtype is torch.float32 else "tf32",
        "num_warps": tiling.num_warps,
        "num_stages": tiling.num_stages,
        **chained(x),
    }
    _grouped_up_kernel[triton.cdiv(inner, tiling.block_up), num_tiles](
        x,
        starts,
        order,
        gate_up,
        hidden,
        x.stride(0),
        K=num_active,
        BLOCK_N=tiling.block_up,
        NUM_PARTS=num_parts(gate_up, down),
        **sizes,
    )
    _grouped_down_kernel[triton.cdiv(size, tiling.block_down), num_tiles](
        hidden, starts, order, down, terms, BLOCK_N=tiling.block_down, **sizes
    )
    block_d = min(1024, triton.next_power_of_2(size))
    term, extra_gate = extra or (out, None)
    gate = out if extra_gate is None else extra_gate
    _combine_kernel[num_tokens, triton.cdiv(size, block_d)](
        terms,
        weights,
        alive,
        term,
        gate,
        out,
        term.stride(0),
        gate.stride(0),
        D=size,
        K=num_active,
        BLOCK_D=block_d,
        HAS_LIVE=has_live,
        HAS_EXTRA=extra is not None,
        HAS_GATE=extra_gate is not None,
        num_warps=4,
        **chained(x),
    )
    return out


def num_parts(up: Tensor, down: Tensor) -> int:
    """Return 2 for a gate and an up of each hidden feature, 1 for an up alone."""
    parts, rest = divmod(up.shape[1], down.shape[2])
    assert not rest, "rows are whole parts"
    assert parts in (1, 2), "hidden features have a gate or have none"
    return parts


def _alive(live: Tensor | None, stand_in: Tensor) -> tuple[Tensor, bool]:
    """Return what the kernels read, and whether they do."""
    return (stand_in, False) if live is None else (live.view(torch.uint8), True)


def _assert_layout(x: Tensor, *contiguous: Tensor) -> None:
    assert x.stride(1) == 1, "a token's features are contiguous"
    assert all(t.is_contiguous() for t in contiguous), (
        "weights, experts and matrices are contiguous"
    )
