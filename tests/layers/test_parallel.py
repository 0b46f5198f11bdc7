"""Layers and loader over several ranks, as threads of one process: float64, equal to one rank."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from gapless.config.hf import read_hf_config
from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.footprint import Footprint
from gapless.core.parallel import check_world_size
from gapless.core.plan import DecodeRow, PrefillSegment, StepPlan
from gapless.core.request import Request
from gapless.core.sampling_params import SamplingParams
from gapless.core.specs.attention import AttentionSpec, LatentSpec, WideNormSpec
from gapless.core.specs.feed_forward import MlpSpec, MoeSpec
from gapless.core.specs.linear import LightningSpec, LinearSpec, Recurrence, ShortConvSpec, SsmSpec
from gapless.errors import ConfigError, WeightMismatch
from gapless.layers.linear import PartialLinear
from gapless.layers.placement import Placement
from gapless.layers.shard import Shard, Share
from gapless.models import loader
from gapless.models.loader import dummy_weights, load_weights
from gapless.models.mtp import MtpHead
from gapless.models.registry import model_module, read_architecture
from gapless.ops.skinny_linear import Float8Matrix, skinny_linear
from gapless.runner.pools import make_geometry, make_pools
from tests.ranks import (
    CONFIGS,
    ThreadRunners,
    make_recipe,
    make_runner,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from gapless.engine.load import Recipe
    from gapless.layers.batch import LinearMemory
    from gapless.runner.runner import Runner
    from tests.ranks import CheckpointOf

CPU = torch.device("cpu")
MAX_ERROR = 1e-10
# every model on two ranks; where each has fewer KV heads than ranks, and a padded head, on four
CASES = [*((name, 2) for name in CONFIGS), ("qwen3_5_four", 4), ("qwen3_one_kv_head", 4)]
AT = pytest.mark.parametrize(("name", "world_size"), CASES)


class Recorder:
    """A model that keeps the hidden states of its last forward."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.hidden: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, *args: Any) -> Tensor:
        self.hidden = self.model.forward(*args)
        return self.hidden


def record(runner: Runner) -> Recorder:
    recorder = Recorder(runner.device.model)
    object.__setattr__(runner.device, "model", recorder)
    return recorder


def request(tokens: list[int]) -> Request:
    return Request(
        request_id="r", prompt_ids=tuple(tokens), params=SamplingParams(temperature=0.0),
        seed=0, stop_ids=(), limit_len=10**6,
    )  # fmt: skip


def plans() -> list[StepPlan]:
    """A prompt in three chunks beside one in a single chunk, then decode steps that fold."""
    generator = torch.Generator().manual_seed(3)
    long, short = (
        request(torch.randint(2, 250, (n,), generator=generator).tolist()) for n in (37, 5)
    )
    pages = {0: (6, 1, 4, 2, 9), 2: (3, 0, 7, 5, 8)}

    def segment(owner: Request, slot: int, start: int, end: int) -> PrefillSegment:
        return PrefillSegment(
            owner, slot, 1 - slot // 2, pages[slot], start, end, end == len(owner.token_ids)
        )

    rows = (DecodeRow(long, 0), DecodeRow(short, 2))
    prefills = [
        (segment(long, 0, 0, 11),),
        (segment(long, 0, 11, 30), segment(short, 2, 0, 5)),
        (segment(long, 0, 30, 37),),
    ]
    chunks = [StepPlan(i, segments, (), (), 0) for i, segments in enumerate(prefills)]
    return [*chunks, *(StepPlan(3 + i, (), rows, (), 70) for i in range(9))]


def logits_of(
    run: Callable[[StepPlan], Any], each: Callable[[Callable[[int], Any]], list[Any]],
    runners: list[Runner],
) -> list[list[Tensor]]:  # fmt: skip
    """Logits of every token of every step, by step and rank."""
    recorders = [record(runner) for runner in runners]
    found = []
    for plan in plans():
        run(plan).wait()

        def logits(rank: int) -> Tensor:
            with torch.inference_mode():
                return recorders[rank].logits(recorders[rank].hidden)

        found.append(each(logits))
    return found


def whole_of(recipe: Recipe) -> tuple[Runner, list[Tensor]]:
    runner = make_runner(recipe)
    found = logits_of(runner.run, lambda call: [call(0)], [runner])
    return runner, [logits for (logits,) in found]


def plain_recipe(checkpoint: Path) -> Recipe:
    linear = read_architecture(read_hf_config(checkpoint)).linear_layers
    more = {"linear_replayssm_cache_len": 4} if linear else {}
    return make_recipe(checkpoint, speculative_algorithm="none", page_size=8, **more)


@AT
def test_logits_and_state_are_those_of_one_rank(
    checkpoint_of: CheckpointOf, name: str, world_size: int
) -> None:
    recipe = plain_recipe(checkpoint_of(name))
    whole, expected = whole_of(recipe)
    split = ThreadRunners(recipe, world_size)
    found = logits_of(split.run, split.ranks.each, split.runners)
    for step, (ranks, wanted) in enumerate(zip(found, expected, strict=True)):
        assert wanted.std() > 0.1
        assert ranks[0].shape == wanted.shape
        assert (ranks[0] - wanted).abs().max() < MAX_ERROR, f"step {step}"
        # the same bits, so that all sample the same
        assert all(torch.equal(logits, ranks[0]) for logits in ranks)
    # one sum after each mixer and one after each block, whatever that is made of
    layers = whole.device.model.architecture.layers
    # and one within a mixer whose norms run over all heads
    num_sums = sum(
        (s.mixer is not None) + (s.mlp is not None)
        + isinstance(s.mixer, WideNormSpec | LightningSpec)
        for s in layers
    ) * len(found)  # fmt: skip
    assert [own.num_sums for own in split.ranks.communicators] == [num_sums] * world_size
    for rank, runner in enumerate(split.runners):
        assert_slice_of(whole, runner, rank, world_size)


def assert_slice_of(whole: Runner, part: Runner, rank: int, world_size: int) -> None:
    """Check that a rank's pools hold its part of the whole's, and its slot table all of it."""
    geometry = whole.device.geometry
    entries = geometry.num_pages * geometry.page_size
    layers = whole.device.model.architecture.layers
    for spec, all_of_it, own in zip(
        [spec for layer in layers for spec in layer.memories],
        parts(whole.device.memory), parts(part.device.memory), strict=True,
    ):  # fmt: skip
        if isinstance(spec, AttentionSpec):
            heads = heads_of(spec, rank, world_size)
            assert_near(own[:entries], all_of_it[:entries][:, :, heads])
        elif isinstance(spec, LatentSpec):
            assert_near(own[:entries], all_of_it[:entries])
        else:
            assert_linear_slice(spec, geometry, (all_of_it, own), (rank, world_size))
    for name, column in vars(whole.device.table.columns).items():
        assert torch.equal(column, vars(part.device.table.columns)[name]), name
    assert torch.equal(whole.device.table.window_tokens, part.device.table.window_tokens)


def parts(memory: Sequence[Any]) -> list[Any]:
    """Layers' memories one by one, also of those that have several or none."""
    return [part for own in memory for part in (own if isinstance(own, tuple) else (own,))]


def heads_of(spec: AttentionSpec, rank: int, world_size: int) -> list[int]:
    """KV heads that serve a rank's query heads."""
    own = range(spec.num_heads)[rank * spec.num_heads // world_size :]
    own = own[: spec.num_heads // world_size]
    return sorted({head * spec.num_kv_heads // spec.num_heads for head in own})


def assert_linear_slice(
    spec: LinearSpec, geometry: Any, memory: tuple[LinearMemory, LinearMemory], at: tuple[int, int]
) -> None:
    (whole, own), (rank, world_size) = memory, at
    entries = geometry.num_slots * geometry.conv_ring_len
    if isinstance(spec, ShortConvSpec):
        size = spec.num_channels // world_size
        own_channels = slice(rank * size, (rank + 1) * size)
        assert_near(own.conv_ring[:entries], whole.conv_ring[:entries, own_channels])
        return
    keys = [h for h in range(spec.num_key_heads) if h * world_size // spec.num_key_heads == rank]
    group = spec.num_value_heads // spec.num_key_heads
    values = [group * h + i for h in keys for i in range(group)]
    key_channels = [h * spec.key_dim + i for h in keys for i in range(spec.key_dim)]
    key_size = spec.num_key_heads * spec.key_dim
    value_channels = [h * spec.value_dim + i for h in values for i in range(spec.value_dim)]
    # values are first in Mamba-2, last in the delta rules
    value_start, key_start = 2 * key_size, 0
    if isinstance(spec, SsmSpec):
        value_start, key_start = 0, spec.inner_size
    channels = [key_start + first + i for first in (0, key_size) for i in key_channels]
    channels += [value_start + i for i in value_channels]
    # lightning attention has no convolution
    channels = sorted(channels) if spec.conv_channels else []
    assert_near(own.conv_ring[:entries], whole.conv_ring[:entries, channels])
    rows = geometry.num_state_rows
    assert_near(own.replay.checkpoint[:rows], whole.replay.checkpoint[:rows, values])
    assert own.replay.checkpoint[:2].abs().max() > 0.01
    entries = geometry.num_slots * geometry.ring_len
    for name, heads in (("d_ring", values), ("g_ring", values), ("k_ring", keys)):
        assert_near(vars(own.replay)[name][:entries], vars(whole.replay)[name][:entries][:, heads])


def assert_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=MAX_ERROR, equal_nan=True)


class CountingFile:
    """A safetensors file that counts the bytes that are taken from it, by name."""

    def __init__(self, file: Path, counts: dict[str, int], **options: Any) -> None:
        self._opened = safe_open(file, **options)
        self._counts = counts

    def __enter__(self) -> CountingFile:
        self._handle = self._opened.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> list[str]:
        return self._handle.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._count(name, self._handle.get_tensor(name))

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._handle.get_slice(name), lambda found: self._count(name, found))

    def _count(self, name: str, found: Tensor) -> Tensor:
        self._counts[name] = self._counts.get(name, 0) + found.nbytes
        return found


@dataclass(frozen=True)
class CountingSlice:
    """A slice of such a file."""

    slice: Any
    count: Callable[[Tensor], Tensor]

    def get_shape(self) -> list[int]:
        return self.slice.get_shape()

    def get_dtype(self) -> str:
        return self.slice.get_dtype()

    def __getitem__(self, index: Any) -> Tensor:
        return self.count(self.slice[index])


WHOLE = re.compile(
    r".*((?<!mamba\.)(?<!mixer\.)norm\.weight|norm_hidden\.weight|norm_embedding\.weight"
    r"|norm_f\.weight|(embed_tokens|embeddings)\.weight|(o|out)_proj\.bias"
    r"|(mlp|moe|mixer|feed_forward)\.gate\..*|router\.layer\.weight|expert_bias"
    r"|shared_expert_gate\.weight|mtp\.fc\.weight|eh_proj\.weight"
    r"|(kv_a_proj_with_mqa|q_a_proj|f_a_proj|g_a_proj|fc1_latent_proj|fc2_latent_proj)\.weight)"
)
# norms over all heads
WIDE_NORMS = {"olmo_hybrid": "self_attn.q_norm.weight", "minimax": "self_attn.norm.weight"}
ONE_KV_HEAD = ("qwen3_one_kv_head", "olmo_hybrid")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_rank_reads_its_share_of_the_bytes(
    checkpoint_of: CheckpointOf, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    recipe = make_recipe(checkpoint_of(name))
    counts: dict[str, int] = {}
    monkeypatch.setattr(
        loader, "safe_open", lambda file, **options: CountingFile(file, counts, **options)
    )
    make_runner(recipe)
    whole = dict(counts)
    sums = dict.fromkeys(whole, 0)
    for rank in range(2):
        counts.clear()
        place = Placement(CPU, torch.float64, rank, 2)
        fill(recipe, place)
        assert counts.keys() == whole.keys()
        for key, read in counts.items():
            sums[key] += read
            is_kv = re.search(r"self_attn\.[kv]_(proj|norm)\.", key)
            is_whole = WHOLE.fullmatch(key) and not key.endswith(WIDE_NORMS.get(name, "-"))
            if is_whole or (name in ONE_KV_HEAD and is_kv):
                assert read == whole[key], key
            elif key == "lm_head.weight":
                assert abs(read - whole[key] / 2) < whole[key] / 200
            else:
                assert read * 2 == whole[key], key
    assert sums.get("lm_head.weight", 0) == whole.get("lm_head.weight", 0)


def fill(recipe: Recipe, place: Placement) -> None:
    """Load a rank's part of a model and its MTP layer, and nothing else."""
    spec = read_architecture(recipe.hf)
    module = model_module(recipe.hf.model_type)
    model = module.build(spec, place, num_positions=1)
    targets = model.targets(recipe.weights.names)
    if spec.num_mtp_layers:
        targets |= MtpHead(spec, place).targets(recipe.weights.names)
    load_weights(
        recipe.weights.files, targets,
        canonical=loader.text_prefix, ignore=module.ignore_rules(spec)[:1],
    )  # fmt: skip


@AT
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bytes_are_those_of_a_rank(
    checkpoint_of: CheckpointOf, name: str, world_size: int, device: str
) -> None:
    recipe = plain_recipe(checkpoint_of(name))
    spec = read_architecture(read_hf_config(checkpoint_of(name)))
    has_mtp = spec.num_mtp_layers > 0
    config = replace(recipe.config, max_window=1 + 3 * has_mtp, num_pages=7, dtype="float32")
    footprint = Footprint(
        architecture=spec, device=device, dtype="float32", ssm_dtype="float32", page_size=8,
        replay_len=config.replay_len, max_window=config.max_window, world_size=world_size,
    )  # fmt: skip
    # the last rank is the one with padding
    place = Placement(
        torch.device("cpu" if device == "cpu" else "meta"), torch.float32, world_size - 1,
        world_size,
    )  # fmt: skip
    model = model_module(spec.model_type).build(spec, place, num_positions=1)
    targets = model.targets(())
    geometry = make_geometry(spec, config)
    pools = make_pools(spec, geometry, place, torch.float32, has_mtp=has_mtp)
    num_bytes = sum(pool.nbytes for pool in pools.kv)
    num_bytes += sum(t.nbytes for stacked in pools.linear for t in tensors(stacked))
    if has_mtp:
        targets |= MtpHead(spec, place).targets(())
        # the drafter's own: hidden states by slot and position, and by state row
        vectors = (geometry.num_slots + 1) * geometry.hidden_ring_len + geometry.num_state_rows + 1
        num_bytes += vectors * spec.hidden_size * 4
    targets.pop("lm_head.weight", None)
    weights = sum((t.tensor if isinstance(t, Shard) else t).nbytes for t in targets.values())
    if model._copies_embedding or not spec.ties_embeddings:
        weights += model._head.nbytes
    assert footprint.weight_bytes == weights
    num_snapshots = config.num_state_rows - config.max_running_requests
    assert num_bytes == footprint.pool_bytes(
        num_requests=config.max_running_requests, num_pages=7, num_snapshots=num_snapshots
    )


def tensors(memory: LinearMemory) -> list[Tensor]:
    return [memory.conv_ring, *vars(memory.replay).values()]


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_moe", "llama"])
def test_made_up_weights_are_slices_of_the_whole(name: str, checkpoint_of: CheckpointOf) -> None:
    spec = read_architecture(read_hf_config(checkpoint_of(name)))
    build = model_module(spec.model_type).build
    whole = build(spec, Placement(CPU, torch.float64), num_positions=1).targets(())
    dummy_weights(whole, 9)
    num_shards = 0
    for rank in range(2):
        place = Placement(CPU, torch.float64, rank, 2)
        own = build(spec, place, num_positions=1).targets(())
        dummy_weights(own, 9)
        for key, target in own.items():
            if isinstance(target, Shard):
                num_shards += 1
                for piece, index in target.pieces():
                    assert torch.equal(piece, whole[key][index]), key
            else:
                assert torch.equal(target, whole[key]), key
    assert num_shards > 20


class RowMajor(Placement):
    """A CPU that lays matrices out as a GPU does."""

    @property
    def is_input_major(self) -> bool:
        return False


@pytest.mark.parametrize(("vocab_size", "rows"), [(10, (5, 5)), (11, (6, 5))])
def test_a_tied_head_is_part_of_the_embedding(vocab_size: int, rows: tuple[int, int]) -> None:
    spec = replace(described(LayerSpec(ATTENTION, MlpSpec(60))), vocab_size=vocab_size)
    spec = replace(spec, ties_embeddings=True)
    hidden = torch.randn(3, 16, dtype=torch.float64)
    logits, drafted = [], []
    for rank in range(2):
        place = RowMajor(CPU, torch.float64, rank, 2)
        model = model_module("llama").build(spec, place, num_positions=1)
        dummy_weights(model.targets(()), 1)
        model.finalize()
        assert model._copies_embedding is (rows[rank] < rows[0])
        own = model._embedding[rank * rows[0] :][: rows[rank]]
        assert (model._head.data_ptr() == own.data_ptr()) is not model._copies_embedding
        logits.append(torch.nn.functional.linear(hidden, model._head))
        found = model.logits(hidden)  # this communicator gathers nothing
        assert torch.equal(found, logits[-1])
        model.keep_draft_head()
        drafted.append(model.draft_logit_shard(hidden).whole())
    joined = torch.cat(logits, dim=1)
    assert_near(joined[:, :vocab_size], hidden @ model._embedding.t())
    assert not joined[:, vocab_size:].any()
    # a row's scale is its own, so ranks' copies are parts of that of the whole
    joined = torch.cat(drafted, dim=1)
    whole = Float8Matrix.of(model._embedding)
    assert_near(joined[:, :vocab_size], skinny_linear(hidden, whole))
    assert not joined[:, vocab_size:].any()


def test_misshapen_shards_are_named_with_the_stored_shape(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(6, 5)}, tmp_path / "x.safetensors")
    target = Shard(torch.zeros(4, 5), 0, Share(8, ((4, 4),)))
    with pytest.raises(WeightMismatch, match=r"a F32 \[6, 5\] in x\.safetensors, want \[8, 5\]"):
        load_weights(
            [tmp_path / "x.safetensors"], {"a": target}, canonical=lambda name: name, ignore=[]
        )


def test_shares() -> None:
    first, last = (Placement(CPU, torch.float32, rank, 3) for rank in (0, 2))
    assert last.share(6, 9, 3) == Share(18, ((4, 2), (12, 3), (17, 1)))
    assert first.share(6, 9, 3) == Share(18, ((0, 2), (6, 3), (15, 1)))
    assert Placement(CPU, torch.float32).share(6, 9, 3) == Share.whole(18)
    # 2 heads over 6 ranks: three of them have the same one
    sixth = [Placement(CPU, torch.float32, rank, 6).head_share(2, 5) for rank in range(6)]
    assert [share.ranges for share in sixth] == [((0, 5),)] * 3 + [((5, 5),)] * 3
    assert last.head_share(6, 5) == Share(30, ((20, 10),))
    # 5 rows of 3 each: the last rank finds none
    assert [p.padded_share(5, 3).ranges for p in (first, last)] == [((0, 3),), ((5, 0),)]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_partial_linear_adds_its_bias_once(world_size: int) -> None:
    weight, bias = torch.randn(5, 8, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    x = torch.randn(3, 8, dtype=torch.float64)
    total = torch.zeros(3, 5, dtype=torch.float64)
    for rank in range(world_size):
        place = Placement(CPU, torch.float64, rank, world_size)
        share = place.share(8)
        term = PartialLinear(share, 5, place, has_bias=True)
        targets = term.targets("o")
        ((start, length),) = share.ranges
        own = targets["o.weight"]
        (own.tensor if isinstance(own, Shard) else own).copy_(weight[:, start : start + length])
        targets["o.bias"].copy_(bias)
        total += term(x[:, start : start + length])
    assert_near(total, x @ weight.t() + bias)


ATTENTION = AttentionSpec(
    num_heads=12, num_kv_heads=4, head_dim=8, rotary_dim=8, rope_theta=1e4, has_qk_norm=True,
    has_output_gate=True,
)  # fmt: skip
LINEAR = LinearSpec(
    recurrence=Recurrence.GATED_DELTA, num_key_heads=6, num_value_heads=18, key_dim=4,
    value_dim=5, conv_width=4,
)  # fmt: skip
MOE = MoeSpec(num_experts=4, num_active=2, intermediate_size=24, shared_size=36, renormalises=True)


def described(*layers: LayerSpec) -> Architecture:
    return Architecture("mixed", 100, 16, layers, 1e-6, ties_embeddings=False, max_position=100)


MIXED = described(LayerSpec(LINEAR, MlpSpec(60)), LayerSpec(ATTENTION, MOE))


@pytest.mark.parametrize("world_size", [1, 2])
def test_sizes_that_divide(world_size: int) -> None:
    check_world_size(MIXED, world_size)


@pytest.mark.parametrize(
    ("world_size", "problems"),
    [
        (3, ["num_key_value_heads=4"]),
        (4, ["linear_num_key_heads=6"]),
        (5, ["linear_num_key_heads=6", "num_attention_heads=12", "moe_intermediate_size=24",
             "shared_expert_intermediate_size=36", "num_key_value_heads=4"]),
        (8, ["linear_num_key_heads=6", "intermediate_size=60", "num_attention_heads=12",
             "shared_expert_intermediate_size=36"]),
    ],
)  # fmt: skip
def test_all_sizes_in_the_way_are_named_at_once(world_size: int, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        check_world_size(MIXED, world_size)
    message = str(caught.value)
    assert re.findall(r"\w+=\d+", message)[1 : 1 + len(problems)] == problems
    assert message.count("=") == len(problems) + 2
    assert message.endswith("of mixed; use tp=1 or 2")


def test_kv_heads_may_be_kept_by_several_ranks() -> None:
    check_world_size(described(LayerSpec(replace(ATTENTION, num_kv_heads=1), MlpSpec(12))), 12)
    check_world_size(described(LayerSpec(ATTENTION, MlpSpec(12))), 12)
