"""Attention planned on the host, on a GPU: late copies change nothing, and no plan waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.gpu.host_planned import KINDS, check
from benchmarks.gpu.models import write_checkpoint
from gapless import LLM, SamplingParams
from gapless.attention import flashinfer
from gapless.attention.flashinfer import FlashInferAttention
from gapless.attention.triton import TritonAttention
from gapless.core.specs.attention import LatentSpec
from gapless.errors import BackendUnavailable
from gapless.runner.inputs import Download, Upload
from gapless.runner.plan_stream import PlanStream
from gapless.runner.syncs import forbid_syncs
from tests.engine_fixtures import runner_of

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.gpu

SPEC = LatentSpec(
    num_heads=16, q_lora_rank=0, kv_lora_rank=512, nope_dim=128, rope_dim=64, value_dim=128,
    scale=192**-0.5, rotary=None,
)  # fmt: skip
PROMPTS = [[7 + 3 * i for i in range(n)] for n in (5, 70, 1, 33, 12)]
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_tokens=40 - 5 * i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
# a few milliseconds, far longer than the host takes for a step
DELAY_CYCLES = 5_000_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint("small-latent", tmp_path_factory.mktemp("latent"))


def serve(checkpoint: Path, **options: Any) -> tuple[LLM, list[tuple[int, ...]]]:
    llm = LLM(
        str(checkpoint), device="cuda", load_format="dummy", max_running_requests=4,
        max_model_len=256, speculative_num_steps=3, seed=1, **options,
    )  # fmt: skip
    # served twice: what the first time leaves in buffers is stale the second time
    results = [*llm.generate(PROMPTS, PARAMS), *llm.generate(PROMPTS[::-1], PARAMS)]
    return llm, [result.token_ids for result in results]


def needs_flashinfer() -> None:
    reason = flashinfer.unsupported([SPEC], "bfloat16")
    if reason is not None:
        pytest.skip(reason)


def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the device busy before every copy and every join, so that the host is far ahead."""
    owners = (
        (Upload, "send"), (Download, "fetch"), (PlanStream, "run"),
        (FlashInferAttention, "plan_host"),
    )  # fmt: skip
    for owner, name in owners:
        honest = getattr(owner, name)

        def late(*args: Any, _honest: Any = honest, **rest: Any) -> Any:
            torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
            return _honest(*args, **rest)

        monkeypatch.setattr(owner, name, late)


@pytest.mark.parametrize("kind", ["triton", "host"])
def test_windows_as_defined(kind: str) -> None:
    if KINDS[kind]["attention_backend"] == "flashinfer":
        needs_flashinfer()
    found = check(kind, torch.device("cuda:0"))
    assert found["ok"], found


@pytest.mark.parametrize("plan_stream", [False, True])
def test_late_copies_change_no_token(
    plan_stream: bool, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_flashinfer()
    options: dict[str, Any] = {"attention_backend": "flashinfer", "plan_stream": plan_stream}
    _, wanted = serve(checkpoint, attention_backend="flashinfer")
    _late(monkeypatch)
    llm, found = serve(checkpoint, **options)
    assert found == wanted
    launches = llm.engine.launch_counters
    # each set of graphs is captured with plans of its own
    assert launches.num_plans == 4 * (launches.num_steps + launches.num_setups)
    assert (launches.num_planned_beside > 0) == plan_stream


def test_plans_never_sync(checkpoint: Path) -> None:
    needs_flashinfer()
    llm, _ = serve(checkpoint, attention_backend="flashinfer")
    stream = llm.stream(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=120))
    for _ in range(3):
        next(stream)
    launch = llm.engine._loop._run

    def guarded(plan: Any) -> Any:
        with forbid_syncs():
            return launch(plan)

    llm.engine._loop._run = guarded
    for _ in range(6):
        llm.engine.step()
    stream.close()


def test_a_device_planned_backend_that_claims_otherwise(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, wanted = serve(checkpoint, attention_backend="triton")
    monkeypatch.setattr(TritonAttention, "needs_cpu_seq_lens", True)
    _late(monkeypatch)
    llm, found = serve(checkpoint, attention_backend="triton")
    assert found == wanted
    graphs = runner_of(llm)._decode._graphs._graphs
    assert all(graph.num_launches == 3 + key.is_masked for key, graph in graphs.items())


@pytest.mark.parametrize(
    "switch",
    [
        {"disable_overlap_schedule": True},
        {"disable_cuda_graph": True},
        {"stage_graphs": True},
        {"disable_fused_metadata": True},
    ],
    ids=lambda switch: next(iter(switch)),
)
def test_switches_change_no_token(switch: dict[str, Any], checkpoint: Path) -> None:
    # where the host reads sooner, rows may meet in other batches, and so in other shapes
    options: dict[str, Any] = {"attention_backend": "triton", "dtype": "float32"}
    llm, wanted = serve(checkpoint, **options)
    assert llm.engine.launch_counters.num_fused == llm.engine.launch_counters.num_steps
    llm, found = serve(checkpoint, **options, **switch)
    assert found == wanted
    launches = llm.engine.launch_counters
    assert (launches.num_fused == 0) == ("disable_fused_metadata" in switch)
    # capturing sets up steps too, and some are never asked for
    assert (launches.num_setups == launches.num_steps) == ("disable_cuda_graph" in switch)


def test_what_is_not_served_is_refused(checkpoint: Path) -> None:
    needs_flashinfer()
    with pytest.raises(BackendUnavailable, match="dtype float32"):
        serve(checkpoint, attention_backend="flashinfer", dtype="float32")
