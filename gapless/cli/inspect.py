"""`gapless inspect`: what a model is made of, what it takes in memory, and what fits."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from gapless.assets import demo_checkpoint
from gapless.cli.report import table
from gapless.config.budget import divide
from gapless.config.config import DeviceInfo
from gapless.config.drafting import DEFAULT_DRAFTS, MOST_DRAFTS, check_drafting, window_shape
from gapless.config.hf import read_hf_config
from gapless.config.memory import demand, resolve_footprint
from gapless.config.options import EngineOptions
from gapless.config.switches import wants_float8_head
from gapless.core.architecture import conv_ring_capacity, ring_capacity
from gapless.core.footprint import human, num_active_parameters, num_mtp_parameters
from gapless.core.specs.feed_forward import MlpSpec
from gapless.errors import ConfigError
from gapless.observe.logging import configure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from gapless.config.budget import Demand
    from gapless.config.hf import HfConfig
    from gapless.core.architecture import Architecture
    from gapless.core.footprint import Footprint
    from gapless.core.specs.feed_forward import MoeSpec

UNITS = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", start=1)},
}
# beside the full length, requests of this many tokens are counted
SHORT_LEN = 4096
DTYPES = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Room:
    """What is to be filled, and with what."""

    memory_bytes: int
    budget_bytes: int
    """Memory for weights and pools."""
    full_len: int
    """Most tokens of one request."""
    max_running: int | None
    """Requests that state rows and rings are made for; None: as many as run."""


@dataclass(frozen=True)
class Fit:
    """What fits into the budget beside the weights."""

    requests: Mapping[int, int]
    """How many requests of a length, in tokens, run at once."""
    largest_context: int
    """Most tokens of one request; 0 where none fits."""


@dataclass(frozen=True)
class Inspect:
    """Say what a model takes in memory, and what fits, from its config alone: no weights are read.

    Sizes are those of --device, by default this machine's. Beside plain decoding, the sizes with
    speculation of some drafts are shown.
    """

    checkpoint: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")] = None
    """Directory, config.json or hub id, of which only the config is fetched; default: the bundled
    model."""
    num_drafts: int | None = None
    """Drafts per step of the sizes with speculation; 0 leaves them out; default:
    --speculative-num-steps, or 3."""
    memory: str | None = None
    """Memory to fill, such as 80GiB; default: what is free on the device."""
    json: bool = False
    """Print one JSON object, all sizes in bytes."""
    log_level: str = "warning"
    """Least severe messages to show: debug, info, warning or error."""
    engine: EngineOptions = field(default_factory=EngineOptions)

    def run(self) -> int:
        """Run the command."""
        from gapless.models.registry import read_architecture

        configure(self.log_level)
        options = self._options()
        num_drafts = self._num_drafts(options)
        device = self._device(options)
        hf = read_hf_config(self._config_path(options))
        spec = read_architecture(hf)
        plain = resolve_footprint(options, spec, hf.dtype, device)
        drafter = _drafter(options, num_drafts)
        max_window, tree = window_shape(options, num_drafts, drafter)
        num_drafts = max_window - 1
        # who drafts without known MTP layers has no head of theirs
        head_drafter = drafter if spec.num_mtp_layers else "none"
        speculative = replace(
            plain,
            max_window=max_window,
            tree=tree,
            uses_mtp=drafter == "mtp",
            has_float8_head=wants_float8_head(options, device, plain.dtype, drafter=head_drafter),
        )
        footprints = {0: plain, num_drafts: speculative} if num_drafts else {0: plain}
        wanted = demand(options, footprints[num_drafts], device)
        room = Room(
            memory_bytes=device.free_bytes,
            budget_bytes=wanted.budget_bytes,
            full_len=wanted.max_model_len,
            max_running=options.max_running_requests,
        )
        found = {
            "model": _model(hf, spec),
            "settings": _settings(plain),
            "room": asdict(room),
            "sizes": [
                {
                    "num_drafts": drafts,
                    **_sizes(footprint),
                    **asdict(fit(footprint, room)),
                    "engine": _engine(footprint, wanted),
                }
                for drafts, footprint in footprints.items()
            ],
        }
        print(json.dumps(found, indent=1) if self.json else render(found))
        return 0

    def _options(self) -> EngineOptions:
        if self.checkpoint is None:
            return self.engine
        if self.engine.model is not None:
            raise ConfigError(
                f"MODEL {self.checkpoint!r} and model={self.engine.model!r} were both given; give "
                "one of them"
            )
        return replace(self.engine, model=self.checkpoint)

    def _num_drafts(self, options: EngineOptions) -> int:
        check_drafting(options)
        asked, steps = self.num_drafts, options.speculative_num_steps
        if None not in (asked, steps) and asked != steps:
            raise ConfigError(
                f"num_drafts={asked} and speculative_num_steps={steps} were both given; give one"
            )
        if asked is None:
            asked = 0 if options.speculative_algorithm == "none" else steps
        if asked is None:
            asked = DEFAULT_DRAFTS
        if not 0 <= asked <= MOST_DRAFTS:
            raise ConfigError(f"num_drafts={asked}: want 0 to {MOST_DRAFTS}")
        return asked

    def _device(self, options: EngineOptions) -> DeviceInfo:
        from gapless.engine.load import device_info

        if self.memory is None:
            return device_info(options)
        num_bytes = parse_size(self.memory)
        if options.device == "auto":
            return replace(device_info(options), free_bytes=num_bytes)
        # sums for a GPU can be had where there is none: a recent one
        on_gpu = options.device == "cuda"
        return DeviceInfo(options.device, num_bytes, num_threads=1, converts_float8=on_gpu)

    def _config_path(self, options: EngineOptions) -> Path:
        from gapless.models.checkpoint import resolve_config

        if options.model is None:
            return demo_checkpoint()
        return resolve_config(options.model, revision=options.revision)


def _drafter(options: EngineOptions, num_drafts: int) -> str:
    """Who drafts. Configs need not tell of MTP layers, which an engine finds in the weights."""
    if not num_drafts:
        return "none"
    return "ngram" if options.speculative_algorithm == "ngram" else "mtp"


def parse_size(text: str) -> int:
    """Return the bytes of a size such as "80GiB", "1.5 GB" or "1000".

    Raises:
        ConfigError: it is none, or below one byte.
    """
    units = {name.lower(): size for name, size in UNITS.items()}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or (match[2] or "b") not in units or float(match[1]) == 0:
        raise ConfigError(
            f"memory={text!r}: want a number above 0 and a unit, one of {', '.join(UNITS)}, such "
            "as 80GiB"
        )
    return int(float(match[1]) * units[match[2] or "b"])


def fit(footprint: Footprint, room: Room) -> Fit:
    """Fill the budget with requests of the full length, with short ones, and with one long one."""
    most, full = room.max_running, room.full_len
    taken = footprint.pool_bytes(num_requests=most or 0, num_pages=0)
    free = room.budget_bytes - footprint.weight_bytes - taken
    per_request = footprint.request_bytes if most is None else 0

    def count(length: int) -> int:
        each = per_request + footprint.num_pages(length) * footprint.page_bytes
        if free < 0:
            return 0
        if most is None:
            return free // each
        return min(most, free // each) if each else most

    largest = full
    if footprint.page_bytes:
        largest = footprint.longest_request((free - per_request) // footprint.page_bytes)
    elif free < per_request:
        largest = 0
    return Fit(
        requests={length: count(length) for length in (full, min(full, SHORT_LEN))},
        largest_context=min(full, largest) if largest >= 2 else 0,
    )


def _model(hf: HfConfig, spec: Architecture) -> dict[str, Any]:
    kinds = Counter(layer.mixer.kind for layer in spec.layers if layer.mixer is not None)
    blocks = Counter(_block_name(layer.mlp) for layer in spec.layers if layer.mlp is not None)
    return {
        "config": str(hf.path),
        "model_type": hf.model_type,
        "wrapper_type": hf.wrapper_type,
        "layers": dict(kinds),
        "feed_forward": dict(blocks),
        "mtp_layers": spec.num_mtp_layers,
        "parameters": spec.num_parameters,
        "active_parameters": num_active_parameters(spec),
        "mtp_parameters": num_mtp_parameters(spec),
        "ties_embeddings": spec.ties_embeddings,
        "context": spec.max_position,
    }


def _block_name(mlp: MlpSpec | MoeSpec) -> str:
    if isinstance(mlp, MlpSpec):
        return "dense"
    shared = " and a shared one" if mlp.shared_size else ""
    return f"{mlp.num_active} of {mlp.num_experts} experts{shared}"


def _settings(footprint: Footprint) -> dict[str, Any]:
    return {
        "device": footprint.device,
        "ranks": footprint.world_size,
        "dtype": footprint.dtype,
        "ssm_dtype": footprint.ssm_dtype,
        "page_size": footprint.page_size,
        "replay_len": footprint.replay_len,
        "weight_bytes_by_dtype": {
            dtype: replace(footprint, dtype=dtype).weight_bytes for dtype in DTYPES
        },
    }


def _sizes(footprint: Footprint) -> dict[str, Any]:
    widths = {spec.conv_width for spec in footprint.architecture.linear_layers}
    window = footprint.max_window
    return {
        "weight_bytes": footprint.weight_bytes,
        "weight_bytes_by_kept_dtype": footprint.weight_bytes_by_dtype,
        "draft_head_bytes": footprint.draft_head_bytes,
        "kv_bytes_per_token": footprint.kv_bytes_per_token,
        "mtp_kv_bytes_per_token": footprint.mtp_kv_bytes_per_token,
        "page_bytes": footprint.page_bytes,
        "state_bytes_per_row": footprint.state_bytes,
        "row_bytes": footprint.row_bytes,
        "ring_bytes_per_request": footprint.ring_bytes,
        "ring_entries": ring_capacity(footprint.replay_len, window) if widths else 0,
        "conv_ring_entries": max((conv_ring_capacity(w, window) for w in widths), default=0),
        "fixed_bytes": footprint.fixed_bytes,
    }


def _engine(footprint: Footprint, wanted: Demand) -> dict[str, Any]:
    """What an engine would do with the memory, or why it would not start."""
    try:
        division = divide(footprint, wanted)
    except ConfigError as error:
        return {"refused": str(error)}
    return {
        "max_running_requests": division.max_running,
        "max_model_len": division.max_model_len,
        "num_pages": division.num_pages,
        "num_snapshots": division.num_snapshots,
        "uses_prefix_cache": division.uses_prefix_cache,
        "bytes": {part.name: part.num_bytes for part in division.parts},
        "shown": {part.name: str(part) for part in division.parts},
    }


def render(found: Mapping[str, Any]) -> str:
    """Lay out what was found, for people."""
    settings, room, sizes = found["settings"], found["room"], found["sizes"]
    heads = ["", *("plain" if not s["num_drafts"] else f"{s['num_drafts']} drafts" for s in sizes)]
    size_rows = [
        [label.format(**settings), *(show(size[key]) for size in sizes)]
        for label, key, show in SIZE_ROWS
        if any(size[key] for size in sizes)
    ]
    fit_rows = [
        [
            f"requests of {length:,} tokens{', the full length' * (length == room['full_len'])}",
            *(f"{size['requests'][length]:,}" for size in sizes),
        ]
        for length in sizes[0]["requests"]
    ]
    fit_rows.append(
        ["largest context of one request", *(f"{s['largest_context']:,}" for s in sizes)]
    )
    rows = "as many requests as run"
    if room["max_running"] is not None:
        rows = f"{room['max_running']:,} of them"
    title = (
        f"In {human(room['budget_bytes'])} of {human(room['memory_bytes'])}, with state rows and "
        f"rings for {rows}:"
    )
    heading = "\n".join(f"{name:14}{value}" for name, value in _heading(found).items())
    return "\n".join(
        (
            heading, "", table([heads, *size_rows]), FIXED_NOTE,
            "", title, table([heads, *fit_rows]),
            "", *_engine_lines(heads, [size["engine"] for size in sizes]),
        )
    )  # fmt: skip


def _engine_lines(heads: Sequence[str], found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lay out how an engine with these options divides the memory."""
    lines = [f"An engine refuses: {one['refused']}" for one in found if "refused" in one]
    started = [(head, one) for head, one in zip(heads[1:], found, strict=True) if "shown" in one]
    if started:
        rows = [
            [name, *(one["shown"][name] for _, one in started)] for name in started[0][1]["shown"]
        ]
        lines = ["An engine divides it so:", table([["", *(h for h, _ in started)], *rows]), *lines]
    return lines


def _heading(found: Mapping[str, Any]) -> dict[str, str]:
    model, settings = found["model"], found["settings"]
    layers = [f"{number} {kind}" for kind, number in model["layers"].items()]
    blocks = [f"{number} {kind}" for kind, number in model["feed_forward"].items()]
    active = ""
    if model["active_parameters"] != model["parameters"]:
        active = f", {model['active_parameters']:,} of them active for a token"
    kept = " and ".join(
        f"{human(size)} {dtype}"
        for dtype, size in found["sizes"][0]["weight_bytes_by_kept_dtype"].items()
    )
    others = ", ".join(
        f"{human(size)} in {dtype}"
        for dtype, size in settings["weight_bytes_by_dtype"].items()
        if dtype != settings["dtype"]
    )
    if settings["device"] == "cpu" and model["ties_embeddings"]:
        others += "; a CPU keeps the tied head beside the embedding"
    inside = f" inside {model['wrapper_type']}" if model["wrapper_type"] else ""
    more = f"; {model['mtp_parameters']:,} more for MTP" if model["mtp_layers"] else ""
    if model["mtp_layers"]:
        layers.append(f"{model['mtp_layers']} MTP")
    has_state = found["sizes"][0]["state_bytes_per_row"] > 0
    state = f", state {settings['ssm_dtype']}, L = {settings['replay_len']}" if has_state else ""
    if settings["ranks"] > 1:
        state += f"; sizes below and of weights are those of one of {settings['ranks']} ranks"
    return {
        "model": f"{model['model_type']}{inside}, {model['config']}",
        "layers": ", ".join(layers),
        "feed-forward": ", ".join(blocks),
        "parameters": f"{model['parameters']:,}{active}{more}",
        "weights": f"{kept}; {others}",
        "context": f"{model['context']:,} tokens",
        "settings": f"{settings['device']}, {settings['dtype']}{state}",
    }


SIZE_ROWS: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("weights", "weight_bytes", human),
    ("  head in float8 for drafts", "draft_head_bytes", human),
    ("KV, per token", "kv_bytes_per_token", human),
    ("MTP KV, per token", "mtp_kv_bytes_per_token", human),
    ("page of {page_size} tokens", "page_bytes", human),
    ("recurrent state, per row", "state_bytes_per_row", human),
    ("state row, per request and snapshot", "row_bytes", human),
    ("rings, per request", "ring_bytes_per_request", human),
    ("  replay ring entries", "ring_entries", str),
    ("  convolution ring entries", "conv_ring_entries", str),
    ("fixed *", "fixed_bytes", human),
)
FIXED_NOTE = "* null page, null slot, null and zero state row, zero entries of the rings"
