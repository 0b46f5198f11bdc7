"""From a checkpoint on disk to a model on the device and a runner around it."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gapless.assets import demo_checkpoint
from gapless.config.hf import HfConfig, read_hf_config
from gapless.config.resolve import Config, DeviceInfo, resolve
from gapless.errors import BackendUnavailable
from gapless.layers.placement import Placement
from gapless.models.checkpoint import resolve_checkpoint, weight_files
from gapless.models.loader import dummy_weights, load_weights, stored_tensors, text_prefix
from gapless.models.registry import model_module, read_architecture
from gapless.runner.device import make_device, num_positions
from gapless.runner.runner import Runner

if TYPE_CHECKING:
    from gapless.config.options import EngineOptions
    from gapless.models.decoder import Decoder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run."""

    checkpoint: Path
    hf: HfConfig
    config: Config
    runner: Runner


def load(options: EngineOptions) -> LoadedModel:
    """Read, decide, allocate and load, failing as early as each fault can be seen."""
    if options.model is None:
        logger.info("model = the bundled demo model (none was named)")
        checkpoint = demo_checkpoint()
    else:
        checkpoint = resolve_checkpoint(options.model, revision=options.revision)
    hf = read_hf_config(checkpoint)
    architecture = read_architecture(hf)
    config = resolve(options, architecture, hf.dtype, device_info(options))
    if config.device == "cpu":
        torch.set_num_threads(config.num_threads)
    dtype: torch.dtype = vars(torch)[config.dtype]
    place = Placement(torch.device(config.device), dtype)
    model = _load_model(options, checkpoint, hf, place, config)
    runner = Runner(make_device(model, config, place), config)
    return LoadedModel(checkpoint, hf, config, runner)


def _load_model(
    options: EngineOptions, checkpoint: Path, hf: HfConfig, place: Placement, config: Config
) -> Decoder:
    module = model_module(hf.model_type)
    architecture = read_architecture(hf)
    files = weight_files(checkpoint) if options.load_format == "safetensors" else []
    stored_names = {text_prefix(tensor.name) for tensor in stored_tensors(files)}
    model: Decoder = module.build(architecture, place, num_positions=num_positions(config))
    targets = model.targets(stored_names)
    if options.load_format == "dummy":
        logger.warning("weights are made up (load_format=dummy): the text means nothing")
        dummy_weights(targets, options.seed or 0)
    else:
        ignore = module.ignore_rules(architecture)
        report = load_weights(files, targets, canonical=text_prefix, ignore=ignore)
        logger.info(
            "loaded %d tensors, %.1f MiB, from %s",
            report.num_tensors, report.num_bytes / 2**20, checkpoint,
        )  # fmt: skip
    with torch.no_grad():
        model.finalize()
    return model


def device_info(options: EngineOptions) -> DeviceInfo:
    """Find the device that the options ask for, and measure its free memory.

    Raises:
        BackendUnavailable: a GPU is asked for and there is none.
    """
    kind = options.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        logger.info("device = %s (%s)", kind, "found" if kind == "cuda" else "no GPU found")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise BackendUnavailable(
                "device=cuda, but torch finds no GPU; install gapless[cuda] on a machine with one, "
                "or use device=cpu"
            )
        return DeviceInfo("cuda", torch.cuda.mem_get_info()[0], num_threads=1)
    return DeviceInfo("cpu", _free_host_bytes(), torch.get_num_threads())


def _free_host_bytes() -> int:
    """Host memory that can be had without swapping."""
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024

    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
