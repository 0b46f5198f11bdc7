"""Sampling and acceptance: right, then how fast.

    python -m benchmarks.gpu.sampling [--check] [--measure] [--output figures.json]

Checks compare tokens and tables with the definitions. Times are those of `harness.Op`.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.gpu.harness import Op, capture, main, num_launches, result, rotating, tensors_of
from gapless.ops.acceptance import AcceptColumns
from gapless.ops.acceptance import reference as acceptance_reference
from gapless.ops.acceptance import triton as acceptance
from gapless.ops.sampling import SamplingColumns, SamplingMode, SamplingRows, philox
from gapless.ops.sampling import reference as sampling_reference
from gapless.ops.sampling import triton as sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

VOCAB = 248320
FILTERS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "unfiltered": {},
    "min_p": {"min_p": 0.05},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.95},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}


def check(device: torch.device) -> list[dict[str, Any]]:
    """Compare all kernels with their definitions; a result is name, error, bound and ok."""
    torch.manual_seed(0)
    return [*_sampling_results(device), *_acceptance_results(device)]


def sampling_rows(num_rows: int, device: torch.device, **values: float) -> SamplingRows:
    """Return rows without filters at temperature 1, with seeds of their own."""
    column = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | values
    floats = {k: torch.full((num_rows,), float(v), device=device) for k, v in column.items()}
    columns = SamplingColumns(
        temperature=floats["temperature"],
        top_k=floats["top_k"].long(),
        top_p=floats["top_p"],
        min_p=floats["min_p"],
        seeds=torch.arange(num_rows, device=device) * 0x9E3779B97F4A7C1 - 12345,
        min_len=torch.zeros(num_rows, dtype=torch.int64, device=device),
        stop_ids=torch.full((num_rows, 8), -1, device=device),
    )
    return SamplingRows(columns, torch.arange(num_rows, device=device))


def peaked_logits(num_rows: int, device: torch.device) -> Tensor:
    """Return logits like a model's: a broad body, and a few tokens far above it."""
    logits = torch.randn(num_rows, VOCAB, device=device) * 2.0
    likely = torch.randint(VOCAB, (num_rows, 30), device=device)
    return logits.scatter_add_(1, likely, torch.rand(num_rows, 30, device=device) * 18.0)


def _sampling_results(device: torch.device) -> Iterator[dict[str, Any]]:
    seeds = torch.randint(-(2**62), 2**62, (9,), device=device)
    positions = torch.randint(2**20, (9,), device=device)
    noise = sampling.gumbel_noise(seeds, positions, VOCAB)
    differing = int((noise != philox.gumbel_noise(seeds, positions, VOCAB)).sum())
    yield result("gumbel_noise: values that differ", differing, 0)
    num_rows = 250
    flat, peaked = torch.randn(num_rows, VOCAB, device=device), peaked_logits(num_rows, device)
    ties = (peaked * 2).round() / 2
    positions = torch.arange(num_rows, device=device)
    for (name, options), (kind, logits) in product(
        FILTERS.items(), {"flat": flat, "peaked": peaked, "ties": ties}.items()
    ):
        rows = sampling_rows(num_rows, device, **options)
        found = sampling.sample(logits, positions, rows, mode=SamplingMode.SAMPLED)
        wanted = sampling_reference.sample(logits, positions, rows, mode=SamplingMode.SAMPLED)
        # a running float sum may place top-p's threshold one token off
        bound = 0.004 if "top_p" in options else 0.0
        share = float((found != wanted).float().mean())
        yield result(f"sample {name} {kind}: share of rows that differ", share, bound)
    yield result("sample: rows changed by batch, split or graph", _unsteady(peaked), 0)


def _unsteady(logits: Tensor) -> int:
    """Count tokens that change with the batch, the split or from replay to replay."""
    device, num_rows = logits.device, len(logits)
    positions = torch.arange(num_rows, device=device)
    rows = sampling_rows(num_rows, device, **FILTERS["all"])
    rows.columns.temperature[::3] = 0.0
    rows.columns.top_k[1::3] = 0
    rows.columns.top_p[2::4] = 1.0

    def run(**options: int) -> Tensor:
        return sampling.sample(logits, positions, rows, mode=SamplingMode.DRAWN, **options)

    together = run()
    changed = sum(int((run(split=s) != together).sum()) for s in (1024, 4096))
    changed += int((run(capacity=16) != together).sum())
    for index in ([0], [1, 2, 5]):
        part = replace(rows, slots=rows.slots[index])
        alone = sampling.sample(logits[index], positions[index], part, mode=SamplingMode.DRAWN)
        changed += int((alone != together[index]).sum())
    captured: list[Tensor] = []
    graph = capture([lambda: captured.append(run())])
    for _ in range(3):
        graph.replay()
        changed += int((captured[-1] != together).sum())
    return changed


class Verified:
    """A step's sampled tokens before acceptance; few ids, so that drafts and stops are hit."""

    def __init__(self, rows: int, window: int, device: torch.device) -> None:
        slots, self.null = 257, 256
        lengths = torch.randint(20, (slots,), device=device)
        lengths[self.null] = 0
        self.columns = AcceptColumns(
            seq_lens=lengths,
            checkpoint_len=lengths // 16 * 16,
            done=torch.arange(slots, device=device) == self.null,
            window_tokens=torch.randint(3, (slots, window), device=device),
            num_drafts=torch.randint(window, (slots,), device=device),
            limit_len=lengths + torch.randint(1, 9, (slots,), device=device),
            stop_ids=torch.randint(-1, 20, (slots, 8), device=device),
        )
        self.slots = torch.randperm(self.null, device=device)[:rows]
        self.slots[rows - rows // 4 :] = self.null
        self.sampled = torch.randint(3, (rows, window), device=device)
        self.emitted = torch.zeros(rows, 2 + window, dtype=torch.int64, device=device)

    def settle(self, op: Callable[..., Any], columns: AcceptColumns) -> Any:
        lengths = self.columns.seq_lens[self.slots]
        return op(
            self.sampled, self.slots, lengths, lengths, columns, self.emitted, null_slot=self.null
        )


def _acceptance_results(device: torch.device) -> Iterator[dict[str, Any]]:
    for rows, window in ((1, 1), (256, 1), (33, 4), (256, 16)):
        case, outcomes = Verified(rows, window, device), []
        for op in (acceptance.settle_windows, acceptance_reference.settle_windows):
            own = {f.name: getattr(case.columns, f.name).clone() for f in fields(AcceptColumns)}
            columns = AcceptColumns(**own)
            settled = case.settle(op, columns)
            # any of the null rows' tokens may stay
            columns.window_tokens[case.null, 0] = 0
            outcomes.append([*tensors_of(settled), *tensors_of(columns), case.emitted.clone()])
        differing = sum(not torch.equal(a, b) for a, b in zip(*outcomes, strict=True))
        name = f"settle_windows {rows} rows W={window}: tensors that differ"
        yield result(name, differing, 0)


def _acceptance_ops(device: torch.device) -> Iterator[Op]:
    for rows, window in ((1, 1), (64, 4), (256, 4)):
        case = Verified(rows, window, device)
        lengths = case.columns.seq_lens[case.slots]

        def launch(op: Callable[..., Any], c: Verified = case, n: Tensor = lengths) -> object:
            return op(c.sampled, c.slots, n, n, c.columns, c.emitted, null_slot=c.null)

        kernel = [lambda run=launch: run(acceptance.settle_windows)] * 20
        chain = [lambda run=launch: run(acceptance_reference.settle_windows)] * 5
        yield Op("settle_windows", f"{rows} rows W={window}", kernel, chain,
                 8.0 * rows * (13 + 2 * window), 73.0 * rows)  # fmt: skip


def _sampling_ops(device: torch.device) -> Iterator[Op]:
    for num_rows, (name, options) in product((1, 4, 64, 256), FILTERS.items()):
        mode = SamplingMode.ARGMAX if name == "greedy" else SamplingMode.DRAWN
        rows = sampling_rows(num_rows, device, **options)
        positions = torch.arange(num_rows, device=device)
        read = 4.0 * num_rows * VOCAB
        # a longer graph says no more
        count = min(num_launches(read), 16)
        kernel, chain = rotating(
            lambda n=num_rows: (peaked_logits(n, device),),
            lambda logits, p=positions, r=rows, m=mode: sampling.sample(logits, p, r, mode=m),
            lambda logits, p=positions, r=rows, m=mode: sampling_reference.sample(
                logits, p, r, mode=m
            ),
            count,
        )
        # the chain's time depends on the mode alone
        is_told = name in ("greedy", "all")
        yield Op(f"sample {name}", f"{num_rows} rows V={VOCAB}", kernel,
                 chain[:1] if is_told else [], read, 8.0 * num_rows)  # fmt: skip


def measure(device: torch.device) -> list[dict[str, Any]]:
    """Time all kernels; a row has name, us, bytes, the floor's share and the chain's time."""
    torch.manual_seed(0)
    return [op.row() for op in (*_acceptance_ops(device), *_sampling_ops(device))]


if __name__ == "__main__":
    sys.exit(main(__doc__, {"check": check, "measure": measure}))
