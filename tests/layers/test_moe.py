"""The sparse block: where its weights come from, and what its shared expert adds."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gapless.core.specs.feed_forward import MoeSpec
from gapless.layers.moe import SparseMlp
from gapless.layers.placement import Placement
from gapless.runner.syncs import forbid_syncs

D = 12
PLACE = Placement(torch.device("cpu"), torch.float64)
PLAIN = MoeSpec(num_experts=5, num_active=2, intermediate_size=7, shared_size=0, renormalises=False)
SHARED = MoeSpec(num_experts=5, num_active=2, intermediate_size=7, shared_size=9, renormalises=True)
SPECS = pytest.mark.parametrize("spec", [PLAIN, SHARED])
FUSED = ("m.experts.gate_up_proj", "m.experts.down_proj")


def make(spec: MoeSpec) -> tuple[SparseMlp, dict[str, Tensor]]:
    """Return a block with split experts, filled, and its weights by name."""
    block = SparseMlp(D, spec, PLACE)
    weights = block.targets("m.", ())
    for name, target in weights.items():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        target.copy_(torch.randn(target.shape, generator=generator) * 0.5)
    return block, weights


def swiglu(x: Tensor, weights: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (weights[f"m.{prefix}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
    return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def expected(x: Tensor, spec: MoeSpec, weights: dict[str, Tensor]) -> Tensor:
    rows = []
    for row in x:
        probabilities = (weights["m.gate.weight"] @ row).softmax(0)
        top = probabilities.topk(spec.num_active)
        scale = top.values.sum() if spec.renormalises else 1.0
        out = sum(
            value / scale * swiglu(row, weights, f"experts.{int(expert)}")
            for value, expert in zip(top.values, top.indices, strict=True)
        )
        if spec.shared_size:
            gate = torch.sigmoid(weights["m.shared_expert_gate.weight"] @ row)
            out = out + gate * swiglu(row, weights, "shared_expert")
        rows.append(out)
    return torch.stack([torch.as_tensor(row) for row in rows])


@SPECS
@pytest.mark.parametrize("tokens", [1, 11])
def test_block_agrees_with_its_formula(spec: MoeSpec, tokens: int) -> None:
    block, weights = make(spec)
    x = torch.randn(tokens, D, dtype=torch.float64)
    torch.testing.assert_close(block(x), expected(x, spec, weights), rtol=1e-12, atol=1e-12)


@SPECS
def test_fused_and_split_names_fill_the_same_weights(spec: MoeSpec) -> None:
    split, weights = make(spec)
    fused = SparseMlp(D, spec, PLACE)
    targets = fused.targets("m.", FUSED)
    assert {name for name in targets if ".experts." in name} == set(FUSED)
    for name in targets.keys() - set(FUSED):
        targets[name].copy_(weights[name])
    for expert in range(spec.num_experts):
        gate, up, down = (
            weights[f"m.experts.{expert}.{kind}_proj.weight"] for kind in ("gate", "up", "down")
        )
        targets[FUSED[0]][expert].copy_(torch.cat([gate, up]))
        targets[FUSED[1]][expert].copy_(down)
    x = torch.randn(4, D, dtype=torch.float64)
    assert torch.equal(fused(x), split(x))


@SPECS
@pytest.mark.parametrize("stored", [(), FUSED])
def test_targets_cover_all_weights(spec: MoeSpec, stored: tuple[str, ...]) -> None:
    targets = SparseMlp(D, spec, PLACE).targets("m.", stored)
    assert sum(target.numel() for target in targets.values()) == spec.num_parameters(D)


@SPECS
@pytest.mark.parametrize("tokens", [1, 11])
def test_nothing_waits_for_the_device(spec: MoeSpec, tokens: int) -> None:
    block, _ = make(spec)
    x = torch.randn(tokens, D, dtype=torch.float64)
    with forbid_syncs():
        block(x)


@pytest.mark.parametrize("tokens", [2, 11])
def test_a_padded_row_reaches_no_other(tokens: int) -> None:
    block, _ = make(SHARED)
    x = torch.randn(tokens, D, dtype=torch.float64)
    wanted = block(x)[1:]
    x[0] = float("nan")
    assert torch.equal(block(x)[1:], wanted)
