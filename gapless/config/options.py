"""Every option of the engine, each declared once; flags, help and docs are generated from here."""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass, fields
from typing import Any, Literal

from gapless.errors import ConfigError

logger = logging.getLogger(__name__)

# what others call context parallelism, which does not exist here
CONTEXT_PARALLEL_NAMES = ("cp", "context_parallel_size", "cp_size", "dcp_size")

DtypeName = Literal["auto", "float32", "bfloat16", "float64"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the user asks for. `None` and "auto" mean: choose for me, and log why."""

    model: str | None = None
    """Directory or hub id of the checkpoint; the bundled demo model where none is named."""
    revision: str | None = None
    """Branch, tag or commit of a hub checkpoint."""
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    """Where weights come from; dummy makes them up from the config alone."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs."""
    tp: int = 1
    """Tensor parallelism: processes that the model is split over, each with a GPU of its own, or
    all with their share of this machine's CPU and memory."""
    dtype: DtypeName = "auto"
    """Type of weights, activations and KV; auto: the checkpoint's on a GPU, float32 on a CPU."""
    ssm_dtype: DtypeName = "auto"
    """Type of recurrent state checkpoints; auto: float32, or float64 with --dtype float64."""
    max_model_len: int | None = None
    """Most tokens of one request, prompt and output; default: what the model was trained for."""
    max_running_requests: int | None = None
    """Most requests decoded at once; default: 256 on a GPU, 64 on a CPU."""
    mem_fraction: float | None = None
    """Share of the free memory for weights, state and KV pages; default: 0.9 on a GPU, 0.5 on a
    CPU."""
    max_queued_requests: int | None = None
    """Most requests that wait for their turn; default 8192."""
    disable_prefix_cache: bool = False
    """Keep nothing of a request that has ended; by default prompts that begin alike share work."""
    snapshot_fraction: float | None = None
    """Share for state snapshots of the memory that weights and running requests leave to the
    prefix cache, above 0 and below 1; default 0.25."""
    host_cache_gb: float = 0.0
    """Host memory for a second tier of the prefix cache, in GiB, divided by --tp; 0: none."""
    chunked_prefill_size: int | None = None
    """Most prompt tokens run in one step; default: 8192 on a GPU, 512 on a CPU."""
    page_size: int | None = None
    """Tokens per KV page; default 16."""
    disable_overlap_schedule: bool = False
    """Read each step before the next is planned; by default the host runs one step ahead of the
    device."""
    disable_cuda_graph: bool = False
    """Launch decode steps kernel by kernel, each set up anew; by default a step of a kind is
    captured once and replayed (on a CPU: set up once)."""
    stage_graphs: bool = False
    """A graph for each stage of a decode step (verify, accept, extend, draft); by default stages
    without host work between them share one."""
    disable_fused_metadata: bool = False
    """Make the index tensors of decode steps with a chain of torch operations, on a GPU too; by
    default one kernel makes them there."""
    plan_stream: bool = False
    """Run the host's attention plans on a stream of their own, beside the drafting of the step
    before; for attention backends that plan on the host."""
    attention_backend: Literal["auto", "triton", "flashinfer", "reference"] = "auto"
    """Kernels of attention over pages; auto: triton on a GPU where it serves the model, or for
    latent attention flashinfer where it is installed and measured to be faster."""
    linear_replayssm_cache_len: int | None = None
    """Tokens between two writes of a recurrent state (L); 1 writes it every step; default 16."""
    speculative_algorithm: Literal["auto", "mtp", "ngram", "none"] = "auto"
    """Where drafts come from: the checkpoint's MTP layer, or a look-up in the request's own text;
    auto: mtp where the checkpoint has its weights."""
    speculative_num_steps: int | None = None
    """Passes of the drafter per step, 0 to 15, and so the tokens of the longest run of drafts; 0
    decodes plainly. Default 3 with a drafter."""
    speculative_topk: int = 1
    """Tokens proposed after each draft that is gone on from: 1 drafts a chain, more a tree (mtp
    only)."""
    speculative_num_draft_tokens: int | None = None
    """Tokens that a step verifies per request, at most 16: the newest one, which is the root of the
    tree, and its drafts. A chain has speculative_num_steps + 1; default of a tree: 8, or as close
    to it as its shape allows."""
    draft_head_dtype: Literal["auto", "model", "fp8"] = "auto"
    """Vocabulary head that the MTP layer's drafts are read from: the model's own, or a copy in fp8
    (e4m3, a scale per row), half as many bytes, which may change drafts and never output; auto: fp8
    for a bfloat16 model on a GPU that converts it (sm_89 and later)."""
    speculative_simulate_acceptance: float | None = None
    """Mean tokens per step to pretend, for benchmarks with --load-format dummy."""
    num_threads: int | None = None
    """Threads of the CPU device, in each process with --tp; default: as torch is set up, divided
    by --tp."""
    seed: int | None = None
    """Makes the seeds of unseeded requests, and dummy weights, reproducible."""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineOptions:
        """Build options from keyword arguments.

        Raises:
            ConfigError: a key is unknown; the nearest known one is suggested.
        """
        known = [field.name for field in fields(cls)]
        for key, value in values.items():
            if key in CONTEXT_PARALLEL_NAMES:
                raise ConfigError(
                    f"{key}={value!r}: positions of a request are not divided over ranks, "
                    "and attention plans need whole lengths; use tp"
                )
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"known options: {', '.join(known)}"
                )
                raise ConfigError(f"unknown option {key!r}; {hint}")
        return cls(**values)


def choose(name: str, asked: int | None, default: int) -> int:
    """Return what is asked for of an option, or else the default, logged."""
    if asked is not None:
        return asked
    logger.info("%s = %d (default)", name, default)
    return default
