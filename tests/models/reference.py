"""The oracle: transformers' own one-shot forward pass, in float32 or truly in float64.

One-shot passes only: transformers' cached multi-token paths have been wrong for some hybrids.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


FINAL_NORMS = ("norm", "norm_f", "final_layernorm", "embedding_norm")


@dataclass(frozen=True)
class Reference:
    """Outputs of one forward pass over `[B, T]` token ids."""

    layers: tuple[Tensor, ...]
    """Output of every decoder layer, `[B, T, D]` each."""
    hidden: Tensor
    """Hidden states after the final norm, `[B, T, D]`."""
    logits: Tensor
    """`[B, T, vocabulary]`."""


def run_reference(model: Any, token_ids: Tensor, dtype: torch.dtype) -> Reference:
    """Run a transformers causal model once over `token_ids` [B, T], without padding or cache.

    Args:
        dtype: float32, or float64: then every operation runs in float64, those included that
            transformers casts to float32, rotary frequencies and decays among them.
    """
    assert dtype in (torch.float32, torch.float64), f"no reference in {dtype}"
    if dtype == torch.float32:
        return _run(model.float(), token_ids)
    with float32_means_float64():
        return _run(_to_float64(model), token_ids)


def hidden_states(model: Any, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the hidden states after the final norm, `[B, T, D]`, of `run_reference`."""
    return run_reference(model, token_ids, dtype).hidden


def logits(model: Any, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the logits, `[B, T, vocabulary]`, of `run_reference`."""
    return run_reference(model, token_ids, dtype).logits


class _Float32MeansFloat64(TorchFunctionMode):
    """Turns every request for float32 that reaches torch into one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(
            *(_widened(value) for value in args),
            **{key: _widened(value) for key, value in (kwargs or {}).items()},
        )


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float32_means_float64() -> Iterator[None]:
    """Run code that casts to float32 by name in float64, on float64 inputs."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float32MeansFloat64():
            yield
    finally:
        torch.set_default_dtype(default)


def _to_float64(model: Any) -> Any:
    """Copy a model to float64; rotary frequencies are computed again, not widened."""
    wide = copy.deepcopy(model).double()
    for layer in wide.model.layers:
        attention = getattr(layer, "self_attn", None)
        if hasattr(attention, "get_slope_rate"):
            _compute_decays(attention)
    children = dict(wide.model.named_children())
    rotary = children.get("rotary_emb", children.get("pos_emb"))
    if rotary is None:  # nothing is rotated
        return wide
    kind = wide.config.rope_parameters["rope_type"]
    compute = ROPE_INIT_FUNCTIONS.get(kind, rotary.compute_default_rope_parameters)
    frequencies, _ = compute(wide.config)
    assert frequencies.dtype == torch.float64, "the cast to float32 was not redirected"
    rotary.inv_freq = frequencies
    return wide


def _compute_decays(attention: Any) -> None:
    """Compute lightning attention's decays again, instead of widening them."""
    rate = attention.get_slope_rate()
    assert rate.dtype == torch.float64, "a power of integers has the default type"
    attention.slope_rate = rate
    names = ("query_decay", "key_decay", "diagonal_decay")
    for name, decay in zip(names, attention.decay_factors(rate), strict=True):
        setattr(attention, name, decay)


def _run(model: Any, token_ids: Tensor) -> Reference:
    layers: list[Tensor] = []
    final: list[Tensor] = []

    def keep(into: list[Tensor]) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            into.append(output[0] if isinstance(output, tuple) else output)

        return hook

    hooks = [layer.register_forward_hook(keep(layers)) for layer in model.model.layers]
    (norm,) = (m for name, m in model.model.named_children() if name in FINAL_NORMS)
    hooks.append(norm.register_forward_hook(keep(final)))
    try:
        with torch.no_grad():
            found = model(token_ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    assert len(final) == 1, "the final norm ran once"
    return Reference(tuple(layers), final[0], found)
