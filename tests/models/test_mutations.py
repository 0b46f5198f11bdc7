"""Mistakes that are easy to make in a model, planted: the comparison with transformers sees each.

Each is tried with the weights that show it better: transformers' own initialization hides some, and
scaled weights hide the place of an epsilon.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch

from gapless.core.specs import linear as linear_specs
from gapless.layers import (
    attention,
    delta_net,
    grouped_moe,
    kda,
    lightning,
    mla,
    moe,
    recurrence,
    short_conv,
    squared_relu_moe,
    ssm,
    wide_norm_attention,
)
from gapless.layers.norm import RmsNorm
from gapless.models import decoder, deepseek_v2, lfm2_moe, minimax, olmo_hybrid
from gapless.ops import moe as moe_ops
from gapless.ops.causal_conv import reference as causal_conv
from gapless.ops.group_routing import reference as group_routing
from gapless.ops.norm import rms_norm
from gapless.ops.qk_norm_rope import reference as qk_norm_rope
from gapless.ops.rope import yarn
from tests.models.comparison import Case, assert_served_right, token_ids

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from tests.models.driver import TeacherForced

Patch = pytest.MonkeyPatch


def _flat_rows(patch: Patch) -> None:
    patch.setattr(delta_net.GatedDeltaNet, "_ungroup_rows", lambda self: None)


def _swapped_b_and_a(patch: Patch) -> None:
    honest = delta_net.GatedDeltaNet.finalize

    def finalize(self: delta_net.GatedDeltaNet) -> None:
        honest(self)
        rows = self._in_proj.weight[-2 * self._spec.num_value_heads :]
        rows.copy_(rows.roll(self._spec.num_value_heads, 0))

    patch.setattr(delta_net.GatedDeltaNet, "finalize", finalize)


def _tiled_key_heads(patch: Patch) -> None:
    """Give value head j the key head j % H instead of j // (HV / H)."""

    def tiled(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, *rest: Any, **named: Any
                 ) -> Tensor:  # fmt: skip
            axis, heads, values = beta.ndim - 1, q.shape[-2], v.shape[-2]
            # the honest op pairs place i with key head i // (HV / H): put the heads that would
            # be tiled to it there
            order = torch.arange(values).view(-1, heads).t().reshape(-1)
            v, beta, g = (x.index_select(axis, order) for x in (v, beta, g))
            return op(q, k, v, beta, g, *rest, **named).index_select(axis, order.argsort())

        return call

    for name in ("replay_window", "chunk_prefill"):
        patch.setattr(recurrence, name, tiled(getattr(recurrence, name)))


def _no_convolution_silu(patch: Patch) -> None:
    honest = causal_conv.causal_conv
    patch.setattr(
        causal_conv, "causal_conv", lambda *args, activation: honest(*args, activation="none")
    )


def _gate_before_norm(patch: Patch) -> None:
    def gated(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, activation: str) -> Tensor:
        return rms_norm(x * torch.nn.functional.silu(gate), weight, eps)

    patch.setattr(delta_net, "gated_rms_norm", gated)


def _tiny_l2norm_eps(patch: Patch) -> None:
    patch.setattr(linear_specs, "L2NORM_EPS", 1e-12)


def _interleaved_rotary(patch: Patch) -> None:
    """Pair channels 2 i and 2 i + 1 instead of i and i + rotary_dim / 2."""
    honest = qk_norm_rope.apply_rotary

    def apply(x: Tensor, rows: Tensor) -> Tensor:
        size = rows.shape[1]
        order = torch.arange(size).view(-1, 2).t().reshape(-1)
        turned = torch.cat([x[..., order], x[..., size:]], -1)
        out = honest(turned, rows)
        return torch.cat([out[..., order.argsort()], out[..., size:]], -1)

    patch.setattr(qk_norm_rope, "apply_rotary", apply)


def _gates_behind_all_queries(patch: Patch) -> None:
    honest = attention.Attention.finalize

    def finalize(self: attention.Attention) -> None:
        rows = self._in_proj.weight[: 2 * self._q_size]
        flat = rows.clone()
        honest(self)
        rows.copy_(flat.roll(self._q_size, 0))

    patch.setattr(attention.Attention, "finalize", finalize)


def _plain_norms(patch: Patch) -> None:
    patch.setattr(RmsNorm, "finalize", lambda self: None)


def _weights_not_renormalised(patch: Patch) -> None:
    honest = moe.route
    patch.setattr(moe, "route", lambda *args, renormalises: honest(*args, renormalises=False))


def _weights_renormalised(patch: Patch) -> None:
    honest = moe.route
    patch.setattr(moe, "route", lambda *args, renormalises: honest(*args, renormalises=True))


def _shared_expert_not_gated(patch: Patch) -> None:
    honest = moe.SparseMlp.__call__

    def call(self: moe.SparseMlp, x: Tensor, live: Tensor | None = None) -> Tensor:
        assert self._shared is not None
        gate = self._gates(x)[:, self._spec.num_experts :].sigmoid()
        return honest(self, x, live) + self._shared(x) * (1 - gate)

    patch.setattr(moe.SparseMlp, "__call__", call)


def _up_before_gate(patch: Patch) -> None:
    honest = moe_ops.reference._activated

    def activated(projected: Tensor, size: int) -> Tensor:
        return honest(torch.cat(projected.chunk(2, -1)[::-1], -1), size)

    patch.setattr(moe_ops.reference, "_activated", activated)


def _one_decay_for_all_channels(patch: Patch) -> None:
    honest = kda.run_recurrence

    def run(inputs: recurrence.RecurrentInputs, *rest: Any) -> Tensor:
        decay = inputs.log_decay
        decay = decay.mean(-1, keepdim=True).expand_as(decay)
        return honest(replace(inputs, log_decay=decay), *rest)

    patch.setattr(kda, "run_recurrence", run)


def _silu_output_gate(patch: Patch) -> None:
    honest = kda.gated_rms_norm
    patch.setattr(kda, "gated_rms_norm", lambda *args, activation: honest(*args, activation="silu"))


def _swapped_low_rank_gates(patch: Patch) -> None:
    honest = kda.KimiDeltaAttention.finalize

    def finalize(self: kda.KimiDeltaAttention) -> None:
        honest(self)
        rank = self._spec.gate_rank
        rows = self._in_proj.weight[-2 * rank :]
        rows.copy_(rows.roll(rank, 0))

    patch.setattr(kda.KimiDeltaAttention, "finalize", finalize)


def _rotated_pairs_taken_for_halves(patch: Patch) -> None:
    patch.setattr(mla.LatentAttention, "finalize", lambda self: None)


def _rotated_key_before_its_latent(patch: Patch) -> None:
    """Take the first channels of the projection for the rotated key."""
    honest = mla.LatentAttention.finalize

    def finalize(self: mla.LatentAttention) -> None:
        rows = self._in_proj.weight[-self._sizes[-1] :]
        rows.copy_(rows.roll(self._spec.rope_dim, 0))
        honest(self)

    patch.setattr(mla.LatentAttention, "finalize", finalize)


def _latent_norms_with_the_models_eps(patch: Patch) -> None:
    patch.setattr(mla, "LATENT_NORM_EPS", 1e-5)


def _no_yarn_sharpening(patch: Patch) -> None:
    patch.setattr(deepseek_v2, "yarn_mscale", lambda factor, mscale: 1.0)


def _no_yarn_attention_factor(patch: Patch) -> None:
    honest = decoder.yarn_table
    patch.setattr(
        decoder, "yarn_table",
        lambda count, rotary, yarn, *rest: honest(count, rotary, yarn, *rest)
        / yarn.attention_factor,
    )  # fmt: skip


def _no_yarn_ramp(patch: Patch) -> None:
    """Divide every frequency."""
    patch.setattr(yarn, "_ramp", lambda rotary, yarn: (-2.0, -1.0))


def _route(patch: Patch, change: Callable[..., tuple[Tensor, Tensor]]) -> None:
    honest = grouped_moe.route_in_groups
    patch.setattr(grouped_moe, "route_in_groups", partial(change, honest))


def _bias_not_in_the_choice(patch: Patch) -> None:
    _route(patch, lambda honest, logits, bias, spec: honest(logits, bias * 0, spec))


def _bias_in_the_weights(patch: Patch) -> None:
    def change(honest: Any, logits: Tensor, bias: Tensor, spec: Any) -> tuple[Tensor, Tensor]:
        _, experts = honest(logits, bias, spec)
        weights = (logits.sigmoid() + bias).gather(1, experts)
        return weights / weights.sum(-1, keepdim=True) * spec.scale, experts

    _route(patch, change)


def _no_groups(patch: Patch) -> None:
    _route(
        patch,
        lambda honest, logits, bias, spec: honest(
            logits, bias, replace(spec, num_groups=1, num_active_groups=1)
        ),
    )


def _routed_weights_not_scaled(patch: Patch) -> None:
    _route(patch, lambda honest, logits, bias, spec: honest(logits, bias, replace(spec, scale=1.0)))


def _groups_worth_their_best(patch: Patch) -> None:
    honest = group_routing._within_best_groups
    patch.setattr(
        group_routing, "_within_best_groups", lambda wanted, spec, count: honest(wanted, spec, 1)
    )


def _no_shared_experts(patch: Patch) -> None:
    patch.setattr(grouped_moe.GroupedMlp, "__call__", moe_without_shared)


def moe_without_shared(
    self: grouped_moe.GroupedMlp, x: Tensor, live: Tensor | None = None
) -> Tensor:
    weights, experts = grouped_moe.route_in_groups(self._gates(x), self._bias, self._routing)
    return grouped_moe.mix_experts(x, weights, experts, self._gate_up, self._down, live=live)


def _change_mamba(patch: Patch, change: Callable[[ssm.Mamba2], None]) -> None:
    """Change every Mamba-2 layer once its weights are there."""
    honest = ssm.Mamba2.finalize

    def finalize(self: ssm.Mamba2) -> None:
        honest(self)
        change(self)

    patch.setattr(ssm.Mamba2, "finalize", finalize)


def _mamba_gate_order(order: linear_specs.GateOrder, patch: Patch) -> None:
    def change(layer: ssm.Mamba2) -> None:
        layer._spec = replace(layer._spec, gate_order=order)

    _change_mamba(patch, change)


def _gate_behind_the_norm(patch: Patch) -> None:
    _mamba_gate_order(linear_specs.GateOrder.NORM_FIRST, patch)


def _gate_before_the_norm(patch: Patch) -> None:
    _mamba_gate_order(linear_specs.GateOrder.GATE_FIRST, patch)


def _one_norm_for_all_groups(patch: Patch) -> None:
    honest = ssm.skip_gate_norm
    patch.setattr(
        ssm, "skip_gate_norm",
        lambda *args, num_groups, **others: honest(*args, num_groups=1, **others),
    )  # fmt: skip


def _time_steps_without(bound: int, patch: Patch) -> None:
    def change(layer: ssm.Mamba2) -> None:
        limits = list(layer._spec.time_step_limit)
        limits[bound] = (0.0, float("inf"))[bound]
        layer._spec = replace(layer._spec, time_step_limit=tuple(limits))

    _change_mamba(patch, change)


def _no_lower_time_step(patch: Patch) -> None:
    _time_steps_without(0, patch)


def _no_upper_time_step(patch: Patch) -> None:
    _time_steps_without(1, patch)


def _no_convolution_bias(patch: Patch) -> None:
    def change(layer: ssm.Mamba2) -> None:
        assert layer._conv_bias is not None
        layer._conv_bias.zero_()

    _change_mamba(patch, change)


def _swapped_b_and_c(patch: Patch) -> None:
    honest = ssm.RecurrentInputs
    patch.setattr(ssm, "RecurrentInputs", lambda q, k, **others: honest(q=k, k=q, **others))


def _skip_of_the_discretised_input(patch: Patch) -> None:
    """Multiply D with dt x instead of x."""
    honest_term, honest_run = ssm.Mamba2.term, ssm.run_recurrence
    skips: list[Tensor] = []

    def term(self: ssm.Mamba2, *args: Any) -> Tensor:
        skips.append(self._skip)
        self._skip = torch.zeros_like(self._skip)
        out = honest_term(self, *args)
        self._skip = skips[-1]
        return out

    def run(inputs: Any, *args: Any) -> Tensor:
        out = honest_run(inputs, *args)
        return out + inputs.v.view(out.shape) * skips[-1][:, None]

    patch.setattr(ssm.Mamba2, "term", term)
    patch.setattr(ssm, "run_recurrence", run)


def _no_factors(patch: Patch) -> None:
    patch.setattr(decoder, "scale_weights", lambda targets, scales: None)


def _no_factor_of_a_layers_last(patch: Patch) -> None:
    """Leave out the factor of the block's output."""
    honest = decoder.scale_weights
    patch.setattr(decoder, "scale_weights", lambda targets, scales: honest(targets, scales[:-1]))


def _no_latent_space(patch: Patch) -> None:
    """Take the first channels for the latent, and leave the others without experts."""
    honest = squared_relu_moe.SquaredReluMoe.__call__

    def call(self: squared_relu_moe.SquaredReluMoe, x: Tensor, live: Tensor | None) -> Tensor:
        assert self._into is not None
        size = self._spec.latent_size
        self._into.weight.copy_(torch.eye(size, x.shape[1], dtype=x.dtype))
        return honest(self, x, live)

    patch.setattr(squared_relu_moe.SquaredReluMoe, "__call__", call)


def _relu_not_squared(patch: Patch) -> None:
    def term(self: Any, x: Tensor) -> Tensor:
        return self._down(torch.relu(self._up(x)))

    patch.setattr(squared_relu_moe.SquaredReluMlp, "term", term)


def _short_convolution_with_silu(patch: Patch) -> None:
    honest = short_conv.convolve
    patch.setattr(
        short_conv, "convolve",
        lambda *args, bias, activation: honest(*args, bias=bias, activation="silu"),
    )  # fmt: skip


def _swapped_gates_of_the_convolution(patch: Patch) -> None:
    def finalize(self: short_conv.ShortConv) -> None:
        size = self._spec.num_channels
        self._in_proj.weight[: 2 * size] = self._in_proj.weight[: 2 * size].roll(size, 0)

    patch.setattr(short_conv.ShortConv, "finalize", finalize)


def _no_eps_beside_the_sum(patch: Patch) -> None:
    patch.setattr(lfm2_moe, "SUM_EPS", 1e-20)


def _without_scale(op: Callable[..., Any], *args: Any, beta_scale: float) -> Any:
    return op(*args)


def _beta_below_one(patch: Patch) -> None:
    honest = delta_net.delta_gates
    patch.setattr(delta_net, "delta_gates", partial(_without_scale, honest))


def _output_norm_with_the_models_eps(patch: Patch) -> None:
    patch.setattr(olmo_hybrid, "OUTPUT_NORM_EPS", 1e-6)
    patch.setattr(minimax, "OUTPUT_NORM_EPS", 1e-5)


def _norms_before_attention(patch: Patch) -> None:
    patch.setattr(olmo_hybrid, "_PostNormLayer", with_post_norm_names(decoder.DecoderLayer))


def with_post_norm_names(kind: type[decoder.DecoderLayer]) -> type[decoder.DecoderLayer]:
    honest = olmo_hybrid._PostNormLayer

    class Layer(honest):  # type: ignore[valid-type, misc]
        __call__ = kind.__call__

    return Layer


def _norm_of_each_head(patch: Patch) -> None:
    def project(self: Any, x: Tensor) -> Tensor:
        projected = attention.Attention.project(self, x)
        *rows, v = projected.split([self._q_size, self._kv_size, self._kv_size], dim=-1)
        normed = []
        for row, weight in zip(rows, self._norms.weights, strict=True):
            heads = row.unflatten(1, (-1, self._spec.head_dim))
            one = torch.ones(self._spec.head_dim, dtype=weight.dtype)
            normed.append(rms_norm(heads, one, self._eps).flatten(1) * weight)
        return torch.cat((*normed, v), dim=-1)

    patch.setattr(wide_norm_attention.WideNormAttention, "project", project)


def _rows_of_heads_taken_for_kinds(patch: Patch) -> None:
    patch.setattr(lightning.LightningAttention, "finalize", lambda self: None)


def _decays_of_the_first_layer(patch: Patch) -> None:
    honest = minimax._lightning
    patch.setattr(minimax, "_lightning", lambda hf, index: honest(hf, 0))


def _scaled_scores(patch: Patch) -> None:
    honest = lightning.RecurrentInputs
    patch.setattr(
        lightning, "RecurrentInputs",
        lambda q, *rest, scale: honest(q, *rest, scale=(q.shape[1] // 4) ** -0.5),
    )  # fmt: skip


def _residual_before_the_norm(patch: Patch) -> None:
    patch.setattr(minimax._NormedResidualLayer, "__call__", decoder.DecoderLayer.__call__)


def _eps_of_undivided_rows(patch: Patch) -> None:
    patch.setattr(minimax._NormedResidualLayer, "divide_eps", lambda self, before, between: None)


_scaled = partial(Case, dtype="float64", scaled=True)
_default = partial(Case, dtype="float32", scaled=False)

MUTATIONS: list[tuple[Callable[[Patch], None], Case]] = [
    (_flat_rows, _scaled("qwen3_next")),
    (_swapped_b_and_a, _scaled("qwen3_next")),
    (_swapped_b_and_a, _scaled("qwen3_5")),
    (_tiled_key_heads, _scaled("qwen3_5")),
    (_no_convolution_silu, _scaled("qwen3_5")),
    (_gate_before_norm, _scaled("qwen3_5")),
    (_tiny_l2norm_eps, _default("qwen3_5")),
    (_interleaved_rotary, _scaled("qwen3_5")),
    (_interleaved_rotary, _scaled("llama")),
    (_gates_behind_all_queries, _scaled("qwen3_5")),
    (_plain_norms, _scaled("qwen3_next")),
    (_weights_not_renormalised, _scaled("qwen3_next")),
    (_weights_not_renormalised, _scaled("qwen3_5_moe")),
    (_weights_renormalised, _scaled("qwen3_moe")),
    (_shared_expert_not_gated, _scaled("qwen3_5_moe")),
    (_up_before_gate, _scaled("qwen3_moe")),
    (_one_decay_for_all_channels, _scaled("kimi_linear")),
    (_silu_output_gate, _scaled("kimi_linear")),
    (_swapped_low_rank_gates, _scaled("kimi_linear")),
    (_latent_norms_with_the_models_eps, _default("kimi_linear")),
    (_latent_norms_with_the_models_eps, _default("glm4_moe_lite")),
    (_bias_not_in_the_choice, _scaled("kimi_linear")),
    (_bias_in_the_weights, _scaled("kimi_linear")),
    (_routed_weights_not_scaled, _scaled("kimi_linear")),
    (_no_shared_experts, _scaled("kimi_linear")),
    (_rotated_pairs_taken_for_halves, _scaled("deepseek_v2")),
    (_rotated_pairs_taken_for_halves, _scaled("deepseek_v3")),
    (_rotated_key_before_its_latent, _scaled("deepseek_v3")),
    (_no_yarn_sharpening, _scaled("deepseek_v2")),
    (_no_yarn_attention_factor, _scaled("deepseek_v2")),
    (_no_yarn_ramp, _scaled("deepseek_v2")),
    (_no_groups, _scaled("deepseek_v2")),
    (_no_groups, _scaled("deepseek_v3")),
    (_groups_worth_their_best, _scaled("deepseek_v3")),
    (_bias_not_in_the_choice, _scaled("glm4_moe")),
    (_gate_behind_the_norm, _scaled("bamba")),
    (_gate_behind_the_norm, _scaled("nemotron_h")),
    (_gate_before_the_norm, _scaled("falcon_h1")),
    (_one_norm_for_all_groups, _scaled("bamba")),
    (_one_norm_for_all_groups, _scaled("nemotron_h")),
    (_no_lower_time_step, _scaled("bamba")),
    (_no_upper_time_step, _scaled("bamba")),
    (_no_convolution_bias, _scaled("bamba")),
    (_no_convolution_silu, _scaled("granitemoehybrid")),
    (_swapped_b_and_c, _scaled("granitemoehybrid")),
    (_skip_of_the_discretised_input, _scaled("bamba")),
    (_skip_of_the_discretised_input, _scaled("nemotron_h")),
    (_no_factors, _scaled("granitemoehybrid")),
    (_no_factor_of_a_layers_last, _scaled("falcon_h1")),
    (_no_shared_experts, _scaled("granitemoehybrid")),
    (_no_latent_space, _scaled("nemotron_h_latent")),
    (_relu_not_squared, _scaled("nemotron_h")),
    (_short_convolution_with_silu, _scaled("lfm2")),
    (_swapped_gates_of_the_convolution, _scaled("lfm2")),
    (_no_eps_beside_the_sum, _scaled("lfm2_moe")),
    (_bias_not_in_the_choice, _scaled("lfm2_moe")),
    (_beta_below_one, _scaled("olmo_hybrid")),
    (_output_norm_with_the_models_eps, _scaled("olmo_hybrid")),
    (_norms_before_attention, _scaled("olmo_hybrid")),
    (_norm_of_each_head, _scaled("olmo_hybrid")),
    (_no_convolution_silu, _scaled("olmo_hybrid")),
    (_output_norm_with_the_models_eps, _scaled("minimax")),
    (_rows_of_heads_taken_for_kinds, _scaled("minimax")),
    (_decays_of_the_first_layer, _scaled("minimax")),
    (_scaled_scores, _scaled("minimax")),
    (_residual_before_the_norm, _scaled("minimax")),
    (_eps_of_undivided_rows, _scaled("minimax")),
    (_no_factors, _scaled("minimax")),
]
ALONE = sorted({case for _, case in MUTATIONS}, key=str)


def _compare(serve: Callable[[Case], TeacherForced], case: Case) -> None:
    forced = serve(case)
    forced.prefill((0, token_ids()[0][:25], 0))
    for token in token_ids()[0][25:30]:
        forced.decode({0: token})
    assert_served_right(forced, case, slot=0)


@pytest.mark.parametrize("case", ALONE, ids=str)
def test_control(serve: Callable[[Case], TeacherForced], case: Case) -> None:
    _compare(serve, case)


@pytest.mark.parametrize(
    ("plant", "case"), MUTATIONS, ids=lambda p: getattr(p, "__name__", str(p)).strip("_")
)
def test_mistake_is_seen(
    serve: Callable[[Case], TeacherForced],
    monkeypatch: Patch,
    plant: Callable[[Patch], None],
    case: Case,
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError, match="logits differ"):
        _compare(serve, case)
