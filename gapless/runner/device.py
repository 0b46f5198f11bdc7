"""The device side that prefill and decode share: model, memory, slot table, backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gapless.attention.backend import AttentionBackend, make_backend
from gapless.core.draft_shape import most_emitted, step_reach
from gapless.core.footprint import mtp_mixer
from gapless.core.parallel import architecture_of_rank
from gapless.errors import ConfigError
from gapless.runner.pools import Pools, make_geometry, make_pools
from gapless.runner.slot_table import SlotTable
from gapless.speculative.mtp import MtpDrafter
from gapless.speculative.ngram import NgramDrafter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.config.config import Config
    from gapless.core.draft_shape import TreeShape
    from gapless.core.specs.attention import PagedSpec
    from gapless.layers.batch import LayerMemory
    from gapless.layers.placement import Communicator, Placement
    from gapless.models.decoder import Decoder
    from gapless.models.mtp import MtpHead
    from gapless.ops.step_metadata import Geometry
    from gapless.speculative.drafter import Drafter


@dataclass(frozen=True)
class Device:
    """Everything on the device that outlives a step."""

    model: Decoder
    geometry: Geometry
    pools: Pools
    table: SlotTable
    backend: AttentionBackend
    draft_backend: AttentionBackend | None
    """That of the drafter, if it attends."""
    num_page_columns: int
    device: torch.device
    drafter: Drafter | None
    tree: TreeShape | None
    """How drafts branch; None: windows are chains."""
    window_offsets: Tensor  # 0 .. W_max, so that no step makes them
    communicator: Communicator
    forced_drafts: Tensor | None  # [4096] int64
    """Drafts to keep, by the position of a window's first sample modulo 4096: acceptance is
    pretended, for benchmarks on made-up weights."""

    @property
    def needs_cpu_seq_lens(self) -> bool:
        """Whether a backend plans on the host, so that lengths must be known there."""
        backends = (self.backend, self.draft_backend)
        return any(b.needs_cpu_seq_lens for b in backends if b is not None)

    @property
    def most_emitted(self) -> int:
        """Tokens that a step emits at most."""
        return most_emitted(self.geometry.max_window, self.tree)

    @property
    def step_reach(self) -> int:
        """Positions that a step reaches from its committed length on, drafting included."""
        return step_reach(self.geometry.max_window, self.tree)

    @property
    def memory(self) -> Sequence[LayerMemory]:
        """Each layer's part of the pools."""
        return self.pools.layers

    def page_blocks(self) -> list[Tensor]:
        """KV by page: [n, pages, ...] of each stacked pool."""
        return [pool.unflatten(1, (-1, self.geometry.page_size)) for pool in self.pools.kv]

    def row_blocks(self) -> list[Tensor]:
        """All that a snapshot holds, by row: [n, rows, ...], rows of nulls and zeros among them."""
        geometry, blocks = self.geometry, []
        for memory in self.pools.linear:
            tails = memory.conv_ring[:, geometry.conv_tail(0).start :]
            blocks.append(memory.replay.checkpoint)
            if geometry.conv_width > 1:
                blocks.append(tails.unflatten(1, (-1, geometry.conv_width - 1)))
        if self.drafter is not None:
            blocks += [rows[None] for rows in self.drafter.row_memory]
        return blocks


def num_positions(config: Config) -> int:
    """Positions that a step may name: the context, and how far steps run ahead of it."""
    window, tree = config.max_window, config.tree
    return config.max_model_len + most_emitted(window, tree) + step_reach(window, tree) + 1


def _forced_drafts(mean_len: float | None, device: torch.device) -> Tensor | None:
    """Return the drafts to keep so that steps emit `mean_len` tokens in the mean."""
    if mean_len is None:
        return None
    # the low bits of a multiplicative hash (Knuth) spread the remainder evenly
    spread = ((torch.arange(4096, device=device) * 2654435761) % 4096).to(torch.float32) / 4096
    return (mean_len - 1.0 + spread).floor().to(torch.int64)


def _attention_of_rank(model: Decoder, config: Config, place: Placement) -> list[PagedSpec]:
    """Whatever attends over pages on one rank."""
    own = architecture_of_rank(model.architecture, place.world_size)
    drafting = [mtp_mixer(own)] if config.drafter == "mtp" else []
    return [*own.attention_layers, *drafting]


def make_device(model: Decoder, mtp: MtpHead | None, config: Config, place: Placement) -> Device:
    """Allocate pools and slot table for a loaded model, and its drafter."""
    geometry = make_geometry(model.architecture, config)
    num_page_columns = -(-num_positions(config) // config.page_size)
    ssm_dtype: torch.dtype = vars(torch)[config.ssm_dtype]
    vocab_size = model.architecture.vocab_size
    table = SlotTable(geometry, num_page_columns, vocab_size, place.device)
    pools = make_pools(
        model.architecture, geometry, place, ssm_dtype, has_mtp=config.drafter == "mtp"
    )
    backend = make_backend(
        config.switches.attention_backend,
        page_size=config.page_size,
        max_len=num_page_columns * config.page_size,
        max_rows=config.max_running_requests,
        device=config.device,
        layers=_attention_of_rank(model, config, place),
        dtype=config.dtype,
        has_tree=config.tree is not None,
    )
    if config.switches.uses_plan_stream and not backend.needs_cpu_seq_lens:
        raise ConfigError(
            "plan_stream has no effect: the attention backend plans on the device; leave it out, "
            "or use attention_backend=flashinfer"
        )
    drafter: Drafter | None = None
    draft_backend: AttentionBackend | None = None
    if config.drafter == "mtp":
        draft_backend = backend
        assert mtp is not None, "the MTP drafter's weights are loaded"
        drafter = MtpDrafter(
            model,
            mtp,
            pools.mtp_layers,
            backend=draft_backend,
            page_table=table.columns.page_table,
            geometry=geometry,
            place=place,
            tree=config.tree,
        )
    elif config.drafter == "ngram":
        drafter = NgramDrafter(
            num_slots=geometry.num_slots,
            num_positions=num_positions(config),
            num_drafts=config.max_window - 1,
            device=place.device,
        )
    return Device(
        model=model,
        geometry=geometry,
        pools=pools,
        table=table,
        backend=backend,
        draft_backend=draft_backend,
        num_page_columns=num_page_columns,
        device=place.device,
        drafter=drafter,
        tree=config.tree,
        window_offsets=torch.arange(config.max_window + 1, device=place.device),
        communicator=place.communicator,
        forced_drafts=_forced_drafts(config.simulated_acceptance, place.device),
    )
