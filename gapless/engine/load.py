"""From a checkpoint on disk to a model on the device and a runner around it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gapless.assets import demo_checkpoint
from gapless.config.checks import num_ranks
from gapless.config.config import Config, DeviceInfo
from gapless.config.hf import HfConfig, read_hf_config
from gapless.config.resolve import resolve
from gapless.engine.worker import Workers
from gapless.errors import BackendUnavailable, ConfigError
from gapless.layers.placement import Alone, Placement
from gapless.models.checkpoint import resolve_checkpoint, weight_files
from gapless.models.loader import dummy_weights, load_weights, stored_tensors, text_prefix
from gapless.models.mtp import MTP_RULE, MtpHead, num_stored_layers
from gapless.models.registry import model_module, read_architecture
from gapless.runner.device import make_device, num_positions
from gapless.runner.reserve import within_memory
from gapless.runner.runner import Runner
from gapless.runner.warm_up import warm_up

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from gapless.config.options import EngineOptions
    from gapless.core.architecture import Architecture
    from gapless.core.plan import StepPlan
    from gapless.engine.loop import Handle
    from gapless.layers.placement import Communicator
    from gapless.models.decoder import Decoder
    from gapless.models.loader import IgnoreRule

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Weights:
    """Weight files and the canonical names of what they hold."""

    files: list[Path]
    names: frozenset[str]


@dataclass(frozen=True)
class Recipe:
    """What every rank builds its part of the model from; travels to the worker processes."""

    checkpoint: Path
    hf: HfConfig
    architecture: Architecture
    config: Config
    weights: _Weights | None
    """None: they are made up."""
    seed: int


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    checkpoint: Path
    hf: HfConfig
    config: Config
    runner: Runner
    workers: Workers | None
    """The ranks above 0, if there are any."""

    def run(self, plan: StepPlan) -> Handle:
        """Launch a step on all ranks.

        Raises:
            InternalError: a rank has ended.
        """
        return self.runner.run(plan) if self.workers is None else self.workers.run(plan)

    @property
    def sentinels(self) -> Sequence[int]:
        """File descriptors that can be read once a rank above 0 has ended."""
        return () if self.workers is None else self.workers.sentinels

    def check(self) -> None:
        """Raise if not all ranks are there.

        Raises:
            InternalError: one has ended.
        """
        if self.workers is not None:
            self.workers.check()

    def close(self) -> None:
        """End the worker processes, if there are any; the model cannot run afterwards."""
        if self.workers is not None:
            self.workers.close()


def load(options: EngineOptions) -> LoadedModel:
    """Read, decide, allocate and load, failing as early as each fault can be seen."""
    recipe = decide(options)
    checkpoint, hf, config = recipe.checkpoint, recipe.hf, recipe.config
    if config.tp == 1:
        return LoadedModel(checkpoint, hf, config, build(recipe, 0, Alone()), None)
    workers = Workers(device=config.device, world_size=config.tp, build=partial(build, recipe))
    try:
        runner = build(recipe, 0, workers.communicator)
        workers.lead(runner)
    except BaseException as error:
        workers.give_up(error)
        raise
    return LoadedModel(checkpoint, hf, config, runner, workers)


def decide(options: EngineOptions) -> Recipe:
    """Find the checkpoint, read its config and headers, and decide every setting."""
    if options.model is None:
        logger.info("model = the bundled demo model (none was named)")
        checkpoint = demo_checkpoint()
    else:
        checkpoint = resolve_checkpoint(options.model, revision=options.revision)
    hf = read_hf_config(checkpoint)
    weights = _find_weights(options, checkpoint)
    architecture = read_architecture(hf)
    if weights is not None:
        # configs may be silent about MTP layers that are stored, and fine-tuning drops them
        architecture = replace(architecture, num_mtp_layers=num_stored_layers(weights.names))
    has_mtp = architecture.num_mtp_layers > 0
    config = resolve(options, architecture, hf.dtype, device_info(options), has_mtp_weights=has_mtp)
    return Recipe(checkpoint, hf, architecture, config, weights, options.seed or 0)


def build(recipe: Recipe, rank: int, communicator: Communicator) -> Runner:
    """Allocate and load one rank's part of a model, and make its runner.

    Raises:
        ConfigError: its steps do not fit the memory that weights and pools leave over.
    """
    config = recipe.config
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
    dtype: torch.dtype = vars(torch)[config.dtype]
    place = Placement(torch.device(config.device), dtype, rank, config.tp, communicator)
    with within_memory(config):
        runner = _make_runner(recipe, place)
        if config.device == "cuda":
            warm_up(runner, config)
    return runner


def _make_runner(recipe: Recipe, place: Placement) -> Runner:
    config, architecture = recipe.config, recipe.architecture
    module = model_module(recipe.hf.model_type)
    model: Decoder = module.build(architecture, place, num_positions=num_positions(config))
    mtp = MtpHead(architecture, place) if config.drafter == "mtp" else None
    _fill(model, mtp, recipe.weights, module.ignore_rules(architecture), recipe.seed)
    if config.switches.has_float8_head:
        model.keep_draft_head()
    return Runner(make_device(model, mtp, config, place), config)


def _find_weights(options: EngineOptions, checkpoint: Path) -> _Weights | None:
    """Look into the files' headers; None where weights are made up."""
    if options.load_format == "dummy":
        return None
    files = weight_files(checkpoint)
    return _Weights(files, frozenset(text_prefix(t.name) for t in stored_tensors(files)))


def _fill(
    model: Decoder,
    mtp: MtpHead | None,
    weights: _Weights | None,
    rules: Sequence[IgnoreRule],
    seed: int,
) -> None:
    """Load a model's weights, or make them up, and derive what follows from them."""
    names = weights.names if weights is not None else frozenset()
    targets = model.targets(names)
    if mtp is not None:
        targets |= mtp.targets(names)
        rules = [rule for rule in rules if rule.reason != MTP_RULE.reason]
    if weights is None:
        logger.warning("weights are made up (load_format=dummy): the text means nothing")
        dummy_weights(targets, seed)
    else:
        report = load_weights(weights.files, targets, canonical=text_prefix, ignore=rules)
        logger.info("loaded %d tensors, %.1f MiB", report.num_tensors, report.num_bytes / 2**20)
    with torch.no_grad():
        model.finalize()
        if mtp is not None:
            mtp.finalize()


def device_info(options: EngineOptions) -> DeviceInfo:
    """Find the device that the options ask for, and measure what one rank may use of it.

    Raises:
        BackendUnavailable: a GPU is asked for and there is none.
        ConfigError: there are fewer GPUs than ranks.
    """
    kind, tp = options.device, num_ranks(options)
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        logger.info("device = %s (%s)", kind, "found" if kind == "cuda" else "no GPU found")
    if kind == "cuda":
        num_gpus = torch.cuda.device_count()
        if tp > 1 and num_gpus < tp:
            raise ConfigError(
                f"tp={tp} needs {tp} GPUs, torch finds {num_gpus} (CUDA_VISIBLE_DEVICES may hide "
                f"some); use tp={max(1, num_gpus)}, or device=cpu"
            )
        if not torch.cuda.is_available():
            raise BackendUnavailable(
                "device=cuda, but torch finds no GPU; install gapless[cuda] on a machine with one, "
                "or use device=cpu"
            )
        ranks = range(tp) if tp > 1 else [torch.cuda.current_device()]
        free = min(torch.cuda.mem_get_info(index)[0] for index in ranks)
        return DeviceInfo("cuda", free, num_threads=1, converts_float8=_converts_float8(ranks))
    return DeviceInfo("cpu", _free_host_bytes() // tp, max(1, torch.get_num_threads() // tp))


def _converts_float8(ranks: Iterable[int]) -> bool:
    """Whether all these GPUs have instructions that convert float8."""
    if torch.version.hip is not None:
        return False
    return all(torch.cuda.get_device_capability(index) >= (8, 9) for index in ranks)


def _free_host_bytes() -> int:
    """Host memory that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
