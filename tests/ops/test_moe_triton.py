"""The mixture-of-experts kernels against the definition in float64.

On a CPU they run in Triton's interpreter, which multiplies no bfloat16: float16 stands in.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless.core.specs.feed_forward import GroupedMoeSpec, Scoring
from gapless.ops.group_routing import reference as group_routing
from gapless.ops.moe import Shared, mix_experts, reference

if TYPE_CHECKING:
    from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    # Triton reads it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

E, K, D, SIZE = 7, 3, 72, 20
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
DTYPES = [(torch.float32, 2e-6), (HALF, 2**-6 if DEVICE == "cuda" else 2**-9)]
PATHS = ["mix_gathered", "mix_grouped"]


def path(name: str) -> Any:
    from gapless.ops.moe import triton

    return getattr(triton, name)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype).to(DEVICE)


def draw_mix(tokens: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return x in wider rows, weights, experts, gate_up and down."""
    weights, experts = reference.route(draw(tokens, E).cpu(), K, renormalises=False)
    matrices = draw(E, 2 * SIZE, D, dtype=dtype) / 8, draw(E, D, SIZE, dtype=dtype)
    x = draw(tokens, D + 4, dtype=dtype)[:, 2:-2]
    return [x, weights.to(DEVICE).contiguous(), experts.to(DEVICE).contiguous(), *matrices]


def wide(tensors: list[Tensor]) -> list[Tensor]:
    return [t.double() if t.is_floating_point() else t for t in tensors]


def close(out: Tensor, wanted: Tensor, tolerance: float) -> None:
    atol = tolerance * float(wanted.abs().max())
    torch.testing.assert_close(out.double(), wanted, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_route_agrees_with_the_definition(dtype: torch.dtype, renormalises: bool) -> None:
    from gapless.ops.moe import triton

    logits = draw(5, E + 2, dtype=dtype)[:, 1:-1]
    # on a coarse grid, so that no rounding decides; with ties
    logits = (logits * 2).round() / 2
    weights, experts = triton.route(logits, K, renormalises=renormalises)
    wanted, wanted_experts = reference.route(logits, K, renormalises=renormalises)
    assert torch.equal(experts, wanted_experts)
    torch.testing.assert_close(weights, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_route_of_a_poisoned_row_stays_within_the_experts() -> None:
    from gapless.ops.moe import triton

    logits = draw(4, E)
    clean = triton.route(logits, K, renormalises=True)
    logits[1], logits[2, 0] = float("nan"), float("inf")
    weights, experts = triton.route(logits, K, renormalises=True)
    assert ((experts >= 0) & (experts < E)).all()
    assert (experts.diff(dim=-1) > 0).all()
    for row in (0, 3):
        assert torch.equal(weights[row], clean[0][row])
        assert torch.equal(experts[row], clean[1][row])


@pytest.mark.parametrize("tokens", [1, 5, pytest.param(21, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("name", PATHS)
def test_mix_agrees_with_float64(
    name: str, dtype: torch.dtype, tolerance: float, tokens: int
) -> None:
    inputs = draw_mix(tokens, dtype)
    out = path(name)(*inputs)
    assert out.dtype is dtype
    close(out, reference.mix_experts(*wide(inputs)), tolerance)


@pytest.mark.parametrize("tokens", [1, 5, pytest.param(21, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("name", PATHS)
def test_mix_without_gates_agrees_with_float64(
    name: str, dtype: torch.dtype, tolerance: float, tokens: int
) -> None:
    x, weights, experts, gate_up, down = draw_mix(tokens, dtype)
    live = torch.ones(tokens, dtype=torch.bool, device=DEVICE)
    live[1:3] = False
    inputs = [x, weights, experts, gate_up[:, :SIZE].contiguous(), down]
    out = path(name)(*inputs, live=live)
    assert out.dtype is dtype
    wanted = reference.finish(reference.mix_experts(*wide(inputs)), live, None)
    close(out, wanted, 2 * tolerance)
    assert wanted.abs().max() > 0


@pytest.mark.parametrize(
    ("block_m", "dtype"),
    [
        (16, torch.float32),
        pytest.param(16, HALF, marks=pytest.mark.slow),
        pytest.param(64, torch.float32, marks=pytest.mark.slow),
        (64, HALF),
    ],
)
def test_tiles_of_every_size_agree_with_float64(block_m: int, dtype: torch.dtype) -> None:
    from gapless.ops.moe import triton

    inputs = draw_mix(50, dtype)
    # one expert has every token, and so more than a tile; some have none
    inputs[2] = torch.tensor([[0, 2, 5]]).expand(50, -1).contiguous().to(DEVICE)
    inputs[2][::7] = torch.tensor([2, 5, 6], device=DEVICE)
    tiling = triton.Tiling(block_m, 16, 32, 32, 4, 2)
    out = triton.mix_grouped(*inputs, tiling=tiling)
    close(out, reference.mix_experts(*wide(inputs)), dict(DTYPES)[dtype])


@pytest.mark.parametrize("sizes", [(4, 32, 4, 1, 2, 4), (16, 16, 8, 3, 16, 8)])
def test_pairs_cut_otherwise_agree_with_float64(sizes: tuple[int, ...]) -> None:
    from gapless.ops.moe import triton

    inputs = draw_mix(3)
    out = triton.mix_gathered(*inputs, tiling=triton.GatheredTiling(*sizes))
    close(out, reference.mix_experts(*wide(inputs)), dict(DTYPES)[torch.float32])


@pytest.mark.parametrize("name", PATHS)
def test_rows_that_are_not_live_are_zeros_and_read_no_expert(name: str) -> None:
    inputs = draw_mix(4)
    experts = inputs[2]
    live = torch.tensor([True, False, False, True], device=DEVICE)
    # two experts that rows without life alone have chosen, full of NaN
    experts[:] = torch.tensor([0, 2, 4])
    experts[~live] = torch.tensor([1, 3, 6], device=DEVICE)
    wanted = path(name)(*inputs).masked_fill(~live[:, None], 0.0)
    inputs[0][~live] = float("nan")
    inputs[1][~live] = float("nan")
    inputs[3][[1, 3, 6]] = float("nan")
    assert torch.equal(path(name)(*inputs, live=live), wanted)
    assert torch.equal(mix_experts(*inputs, live=live)[~live], torch.zeros(2, D, device=DEVICE))
    nothing = path(name)(*inputs, live=torch.zeros_like(live))
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_extra_term_is_gated_and_added(dtype: torch.dtype, tolerance: float) -> None:
    inputs = draw_mix(3, dtype)
    term, gates = draw(3, D + 3, dtype=dtype)[:, :-3], draw(3, 9, dtype=dtype)
    extra = (term, gates[:, 8:])
    out = path("mix_grouped")(*inputs, extra=extra)
    wanted = reference.mix_experts(*wide(inputs)) + term.double() * gates[:, 8:].double().sigmoid()
    close(out, wanted, tolerance)
    by_definition = mix_experts(*wide(inputs), extra=(term.double(), gates[:, 8:].double()))
    assert torch.equal(by_definition, wanted)


@pytest.mark.parametrize(
    ("parts", "size", "is_gated"),
    [(2, SIZE, True), (2, 2 * SIZE + 3, False), (1, SIZE - 5, True)],
)
def test_a_shared_expert_runs_with_the_others(parts: int, size: int, is_gated: bool) -> None:
    """Of the experts' size, of more and of less; its term is what it is when run before."""
    inputs = draw_mix(3)
    inputs[3] = inputs[3][:, : parts * SIZE].contiguous()
    live = torch.tensor([True, False, True], device=DEVICE)
    gate = draw(3, 9)[:, 8:] if is_gated else None
    up, down = draw(parts * size, D) / 8, draw(D, size)
    out = path("mix_gathered")(*inputs, live=live, shared=Shared(up, down, gate))
    projected = wide([inputs[0]])[0] @ up.double().T
    if parts == 2:
        hidden = torch.nn.functional.silu(projected[:, :size]) * projected[:, size:]
    else:
        hidden = projected.relu().square()
    term = hidden @ down.double().T
    extra = (term, None if gate is None else gate.double())
    close(out, reference.finish(reference.mix_experts(*wide(inputs)), live, extra), 2e-6)


@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.BIASED_SIGMOID])
@pytest.mark.parametrize(
    ("groups", "num_open", "renormalises"), [(1, 1, True), (3, 2, False), (5, 1, True)]
)
def test_groups_are_chosen_as_defined(
    groups: int, num_open: int, renormalises: bool, scoring: Scoring
) -> None:
    from gapless.ops.moe import triton

    spec = GroupedMoeSpec(
        num_experts=60, num_active=7, intermediate_size=1, shared_size=0,
        renormalises=renormalises, scoring=scoring, num_groups=groups, num_active_groups=num_open,
        scale=2.5, sum_eps=1e-20,
    )  # fmt: skip
    # on a coarse grid, so that no rounding decides; with ties
    logits = (draw(5, 62)[:, 1:-1] * 4).round() / 4
    bias = (draw(60) * 8).round() / 16 if scoring is Scoring.BIASED_SIGMOID else None
    weights, experts = triton.route(
        logits, 7, renormalises=renormalises, bias=bias, groups=triton.Groups(groups, num_open),
        scale=2.5, sum_eps=1e-20,
    )  # fmt: skip
    wanted, wanted_experts = group_routing.route_in_groups(logits, bias, spec)
    assert torch.equal(experts, wanted_experts)
    torch.testing.assert_close(weights, wanted, rtol=2e-6, atol=1e-7)
    logits[3, 7:13] = float("nan")
    _, poisoned = triton.route(
        logits, 7, renormalises=renormalises, bias=bias, groups=triton.Groups(groups, num_open)
    )
    assert ((poisoned >= 0) & (poisoned < 60)).all()
    assert (poisoned.diff(dim=-1) > 0).all()
    others = [0, 1, 2, 4]
    assert torch.equal(poisoned[others], experts[others])


@pytest.mark.parametrize("name", PATHS)
def test_row_does_not_depend_on_the_others(name: str) -> None:
    inputs = draw_mix(4)
    alone = path(name)(*inputs)[[0, 3]]
    for poison in (float("nan"), 3.0):
        x, weights, experts, *matrices = (t.clone() for t in inputs)
        x[1:3] = poison
        weights[2] = poison
        experts[1:3] = torch.arange(K)
        assert torch.equal(path(name)(x, weights, experts, *matrices)[[0, 3]], alone)


def test_few_pairs_are_gathered_and_many_are_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    from gapless.ops.moe import triton

    taken = []
    for name in PATHS:
        monkeypatch.setattr(triton, name, lambda *_, name=name, **__: taken.append(name))
    for tokens in (1, 21, 22):
        triton.mix_experts(*draw_mix(tokens))
    assert taken == ["mix_gathered", "mix_gathered", "mix_grouped"]
    assert "float64" in str(triton.unsupported_mix(*wide(draw_mix(1))[:2]))
