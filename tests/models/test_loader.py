"""Loading weights: every target is written, or the error names what does not fit."""

from __future__ import annotations

import json
import logging
import struct
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gapless.errors import ModelError, UnsupportedModel, WeightMismatch
from gapless.models.checkpoint import weight_files
from gapless.models.loader import (
    IgnoreRule,
    LoadReport,
    dummy_weights,
    load_weights,
    stored_tensors,
    text_prefix,
)
from tests.models import tiny
from tests.models.reference import run_reference

if TYPE_CHECKING:
    from collections.abc import Sequence

VISION = IgnoreRule(r"model\.visual\..*", "vision: only text is served")
MTP = IgnoreRule(r"mtp\..*", "MTP: speculation is off")
TIED = IgnoreRule(r"lm_head\.weight", "tied", copy_of="model.embed_tokens.weight")


def nan(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def load(files: Sequence[Path], targets: dict[str, Tensor], *rules: IgnoreRule) -> LoadReport:
    return load_weights(files, targets, canonical=text_prefix, ignore=rules)


def shards(directory: Path, *parts: dict[str, Tensor]) -> list[Path]:
    files = [directory / f"part{i}.safetensors" for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        save_file(part, file)
    return files


def raw_file(file: Path, header: dict[str, Any], data: bytes) -> Path:
    """Write a safetensors file by hand, for contents that the library would not write."""
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.x", "model.layers.0.x"),
        ("language_model.model.layers.0.x", "model.layers.0.x"),
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("model.visual.blocks.0.x", "model.visual.blocks.0.x"),
        ("mtp.layers.0.x", "mtp.layers.0.x"),
        ("x.model.language_model.y", "x.model.language_model.y"),
    ],
)
def test_text_prefix(stored: str, canonical: str) -> None:
    assert text_prefix(stored) == canonical
    assert text_prefix(canonical) == canonical


def test_every_target_is_written_with_the_stored_values(tmp_path: Path) -> None:
    weights = {"a": random(5, 3), "b": random(7, seed=1), "c.d": random(2, 1, 4, seed=2)}
    files = shards(tmp_path, {"a": weights["a"]}, {"c.d": weights["c.d"], "b": weights["b"]})
    targets = {name: nan(*tensor.shape) for name, tensor in weights.items()}
    report = load(files, targets)
    for name, tensor in weights.items():
        assert torch.equal(targets[name], tensor), name
    assert (report.num_files, report.num_tensors, report.num_bytes) == (2, 3, 4 * (15 + 7 + 8))
    assert report.ignored == {}


def test_views_of_a_merged_tensor_are_filled_without_touching_the_rest(tmp_path: Path) -> None:
    q, k, gate = random(6, 5), random(3, 5, seed=1), random(4, 2, seed=2)
    files = shards(tmp_path, {"q": q, "k": k, "gate": gate})
    rows, columns = nan(11, 5), nan(4, 5)
    targets = {
        "q": rows.narrow(0, 0, 6),
        "k": rows.narrow(0, 6, 3),
        "gate": columns.narrow(1, 3, 2),
    }
    load(files, targets)
    assert torch.equal(rows[:9], torch.cat([q, k]))
    assert rows[9:].isnan().all()
    assert torch.equal(columns[:, 3:], gate)
    assert columns[:, :3].isnan().all()


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes_are_converted_into_the_target(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    weight = random(5, 3).to(stored)
    target = nan(5, 3, dtype=wanted)
    load(shards(tmp_path, {"a": weight}), {"a": target})
    assert torch.equal(target, weight.to(wanted))


def test_mixed_dtypes_in_one_layer(tmp_path: Path) -> None:
    qkv, decay = random(8, 4).bfloat16(), random(2, seed=1)
    targets = {"qkv": nan(8, 4), "A_log": nan(2)}
    load(shards(tmp_path, {"qkv": qkv, "A_log": decay}), targets)
    assert torch.equal(targets["qkv"], qkv.float())
    assert torch.equal(targets["A_log"], decay)


def test_parameters_that_want_gradients_are_filled(tmp_path: Path) -> None:
    weight = random(4, 3)
    target = torch.nn.Parameter(nan(4, 3))
    load(shards(tmp_path, {"a": weight}), {"a": target})
    assert torch.equal(target, weight)


def mapped_files(directory: Path) -> set[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[-1] for line in lines if str(directory) in line}


class _Watch(TorchFunctionMode):
    """At every copy: which earlier sources are still alive, and which files are mapped."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.sources: list[weakref.ref[Tensor]] = []
        self.num_alive: list[int] = []
        self.num_mapped: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.copy_:
            self.num_alive.append(sum(source() is not None for source in self.sources))
            self.num_mapped.append(len(mapped_files(self.directory)))
            self.sources.append(weakref.ref(args[1]))
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux's list of mappings")
def test_one_tensor_and_one_shard_are_held_at_a_time(tmp_path: Path) -> None:
    parts = [{f"{shard}.{i}": random(64, 32) for i in range(3)} for shard in range(3)]
    files = shards(tmp_path, *parts)
    targets = {name: nan(64, 32) for part in parts for name in part}
    with _Watch(tmp_path) as watch:
        load(files, targets)
    assert watch.num_alive == [0] * 9
    assert watch.num_mapped == [1] * 9
    assert not mapped_files(tmp_path)


def expect_untouched(targets: dict[str, Tensor]) -> None:
    assert all(target.isnan().all() for target in targets.values()), "checked before written"


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    targets = {"a": nan(2), "b": nan(2), "c": nan(2)}
    with pytest.raises(WeightMismatch, match=r"2 missing: b, c; check that config\.json belongs"):
        load(shards(tmp_path, {"a": random(2)}), targets)
    expect_untouched(targets)


def test_unexpected_tensors_are_named_with_file_and_shape(tmp_path: Path) -> None:
    targets = {"a": nan(2)}
    files = shards(tmp_path, {"a": random(2)}, {"a.bias": random(3, 1)})
    with pytest.raises(
        WeightMismatch, match=r"1 unexpected: a\.bias F32 \[3, 1\] in part1\.safetensors"
    ):
        load(files, targets)
    expect_untouched(targets)


@pytest.mark.parametrize("shape", [(3, 4), (12,), (4, 3, 1), (4, 2), (1, 3)])
def test_misshapen_tensors_are_named_with_both_shapes(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    # also shapes that a copy would broadcast or that have as many elements
    targets = {"a": nan(4, 3), "b": nan(2)}
    found = str(list(shape)).replace("[", r"\[").replace("]", r"\]")
    with pytest.raises(WeightMismatch, match=rf"1 misshapen: a F32 {found} in .*, want \[4, 3\]"):
        load(shards(tmp_path, {"a": random(*shape), "b": random(2)}), targets)
    expect_untouched(targets)


@pytest.mark.parametrize("second", ["model.x", "model.language_model.x"])
def test_tensors_stored_twice_are_named_with_both_places(tmp_path: Path, second: str) -> None:
    targets = {"model.x": nan(2)}
    files = shards(tmp_path, {"model.x": random(2)}, {second: random(2, seed=1)})
    place = rf"part0\.safetensors as model\.x and part1\.safetensors as {second}"
    with pytest.raises(WeightMismatch, match=rf"1 stored twice: model\.x in {place}"):
        load(files, targets)
    expect_untouched(targets)


def test_all_kinds_are_reported_together_and_long_lists_are_cut(tmp_path: Path) -> None:
    stored = {"a": random(2)} | {f"extra{i:02}": random(1) for i in range(13)}
    targets = {"a": nan(3)} | {f"gone{i:02}": nan(1) for i in range(10)}
    with pytest.raises(WeightMismatch) as caught:
        load(shards(tmp_path, stored), targets)
    message = str(caught.value)
    assert "10 missing: gone00, " in message
    assert "gone09; " in message
    assert "13 unexpected: extra00 " in message
    assert "extra09 F32 [1] in part0.safetensors and 3 more; " in message
    assert "extra10" not in message
    assert "1 misshapen: a" in message


def test_missing_mtp_layer_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    targets = {"a": nan(2), "mtp.fc.weight": nan(2), "mtp.norm.weight": nan(2)}
    files = shards(tmp_path, {"a": random(2)})
    with pytest.raises(WeightMismatch, match=r"2 missing.*without MTP drafts, or copy the mtp"):
        load(files, targets)
    with pytest.raises(WeightMismatch, match=r"check that config\.json") as caught:
        load(files, targets | {"b": nan(2)})
    assert "MTP" not in str(caught.value)


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32]
)
def test_packed_weights_are_refused_not_converted(tmp_path: Path, dtype: torch.dtype) -> None:
    targets = {"a.weight": nan(4, 2), "b": nan(2)}
    packed = torch.ones(4, 2).to(dtype)
    files = shards(tmp_path, {"a.weight": packed, "b": random(2), "a.weight_scale": random(1)})
    with pytest.raises(
        UnsupportedModel, match=r"1 tensors .*a\.weight [FIU]\S+ \[4, 2\].*want F64"
    ):
        load(files, targets)
    expect_untouched(targets)


def test_ignored_tensors_may_have_any_dtype(tmp_path: Path) -> None:
    files = shards(tmp_path, {"a": random(2), "model.visual.ids": torch.arange(3)})
    targets = {"a": nan(2)}
    report = load(files, targets, VISION)
    assert report.ignored == {VISION: ("model.visual.ids",)}


def test_unknown_stored_dtype_is_refused(tmp_path: Path) -> None:
    header = {"a": {"dtype": "Q3_K", "shape": [2], "data_offsets": [0, 4]}}
    file = raw_file(tmp_path / "odd.safetensors", header, b"\0" * 4)
    with pytest.raises(ModelError, match=r"odd\.safetensors"):
        load([file], {"a": nan(2)})


@pytest.mark.parametrize("kept", [0, 4, 8, 60, -1, -100])
def test_truncated_files_are_named(tmp_path: Path, kept: int) -> None:
    (good, cut) = shards(tmp_path, {"a": random(2)}, {"b": random(40)})
    cut.write_bytes(cut.read_bytes()[:kept])
    targets = {"a": nan(2), "b": nan(40)}
    with pytest.raises(ModelError, match=r"part1\.safetensors is no complete .*download it again"):
        load([good, cut], targets)
    expect_untouched(targets)


@pytest.mark.parametrize("content", [b"<html>not found</html>" * 9, b"\xff" * 200, b"\0" * 200])
def test_garbage_files_are_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.safetensors is no complete safetensors file"):
        load([file], {"a": nan(2)})


def test_lfs_pointers_and_missing_files_have_remedies(tmp_path: Path) -> None:
    pointer = tmp_path / "model.safetensors"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ModelError, match="Git LFS pointer, `git lfs pull`"):
        load([pointer], {"a": nan(2)})
    with pytest.raises(ModelError, match=r"gone\.safetensors cannot be read"):
        load([tmp_path / "gone.safetensors"], {"a": nan(2)})


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_damaged_headers_never_load_nor_escape_the_error_tree(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    (file,) = shards(tmp_path_factory.mktemp("fuzz"), {"a": random(3, 5), "b": random(4)})
    content = bytearray(file.read_bytes())
    header_len = 8 + struct.unpack("<Q", content[:8])[0]
    position = data.draw(st.integers(0, header_len - 1))
    content[position] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    targets = {"a": nan(3, 5), "b": nan(4)}
    try:
        load([file], targets)
    except ModelError:
        expect_untouched(targets)
    else:
        assert not any(target.isnan().any() for target in targets.values())


def test_skipped_tensors_are_logged_once_per_rule(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    visual = {f"model.visual.blocks.{i}.x": random(2) for i in range(7)}
    visual["model.visual.merger.x"] = random(2)
    unused = IgnoreRule(r"audio\..*", "audio")
    files = shards(tmp_path, {"a": random(2), "mtp.fc": random(2)}, visual)
    with caplog.at_level(logging.INFO):
        report = load(files, {"a": nan(2)}, VISION, MTP, unused)
    assert sorted(record.getMessage() for record in caplog.records) == [
        "skipped 1 tensors (mtp.fc): MTP: speculation is off",
        "skipped 8 tensors (model.visual.*): vision: only text is served",
    ]
    assert {rule: set(names) for rule, names in report.ignored.items()} == {
        VISION: set(visual),
        MTP: {"mtp.fc"},
    }


def test_rules_match_whole_names_and_targets_win(tmp_path: Path) -> None:
    rule = IgnoreRule(r"mtp\.fc", "part")
    files = shards(tmp_path, {"mtp.fc": random(2), "mtp.fc.weight": random(2)})
    with pytest.raises(WeightMismatch, match=r"1 unexpected: mtp\.fc\.weight"):
        load(files, {}, rule)
    targets = {"mtp.fc": nan(2)}
    load(files, targets, rule, IgnoreRule(r".*", "all"))
    assert torch.equal(targets["mtp.fc"], random(2))


def model_targets(model: Any) -> dict[str, Tensor]:
    """NaN-filled tensors of a transformers model, by canonical name, ready to be loaded."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    return dict(model.named_parameters())


STYLES = ["plain", "model.language_model.", "language_model.model."]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied"])
def test_three_namings_load_to_equal_logits(tmp_path: Path, name: str, style: str) -> None:
    _, model = tiny.build(name, scaled=True, seed=tiny.VETTED_SEED)
    token_ids = torch.arange(2, 31).view(1, -1)
    expected = run_reference(model, token_ids, torch.float64)
    directory = tiny.save(model, tmp_path / "saved")
    if style != "plain":
        directory = tiny.hub_style(directory, tmp_path / "hub", text_prefix=style)
    load(weight_files(directory), model_targets(model), VISION, MTP)
    found = run_reference(model, token_ids, torch.float64)
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
def test_tied_flag_and_stored_head(tmp_path: Path, *, is_tied: bool, has_head: bool) -> None:
    embedding = random(6, 4)
    stored = {"model.embed_tokens.weight": embedding}
    if has_head:
        stored["lm_head.weight"] = embedding.clone() if is_tied else random(6, 4, seed=1)
    targets = {"model.embed_tokens.weight": nan(6, 4)}
    if not is_tied:
        targets["lm_head.weight"] = nan(6, 4)
    files = shards(tmp_path, stored)
    if not is_tied and not has_head:
        with pytest.raises(WeightMismatch, match=r"1 missing: lm_head\.weight"):
            load(files, targets)
        return
    load(files, targets, *([TIED] if is_tied else []))
    for name, target in targets.items():
        assert torch.equal(target, stored[name])


@pytest.mark.parametrize("head", [random(6, 4, seed=1), random(5, 4)])
def test_a_head_of_its_own_under_a_tied_config_is_not_dropped(tmp_path: Path, head: Tensor) -> None:
    files = shards(tmp_path, {"model.embed_tokens.weight": random(6, 4), "lm_head.weight": head})
    with pytest.raises(WeightMismatch, match=r"differs from model\.embed_tokens\.weight.*to false"):
        load(files, {"model.embed_tokens.weight": nan(6, 4)}, TIED)


def test_copies_are_compared_in_the_targets_dtype(tmp_path: Path) -> None:
    embedding = random(6, 4)
    files = shards(
        tmp_path, {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding + 0}
    )
    targets = {"model.embed_tokens.weight": nan(6, 4, dtype=torch.bfloat16)}
    report = load(files, targets, TIED)
    assert report.ignored == {TIED: ("lm_head.weight",)}


def test_headers_list_all_tensors(tmp_path: Path) -> None:
    files = shards(tmp_path, {"b": random(2, 3).half()}, {"a": random(1).double()})
    found = [(t.name, t.file, t.dtype, t.shape) for t in stored_tensors(files)]
    assert found == [("b", files[0], "F16", (2, 3)), ("a", files[1], "F64", (1,))]


DUMMY_SHAPES = {
    "model.norm.weight": (64,),
    "model.layers.0.linear_attn.A_log": (4,),
    "model.layers.0.linear_attn.dt_bias": (4,),
    "model.layers.0.linear_attn.conv1d.weight": (128, 1, 4),
    "model.layers.0.mlp.down_proj.weight": (64, 112),
    "model.layers.0.self_attn.q_proj.bias": (96,),
}


def dummies(*, seed: int = 3, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    targets = {name: nan(*shape, dtype=dtype) for name, shape in DUMMY_SHAPES.items()}
    dummy_weights(targets, seed)
    return targets


def test_dummy_weights_have_sensible_sizes() -> None:
    found = dummies()
    assert all(target.isfinite().all() for target in found.values())
    norm, a_log, dt_bias, conv, down, bias = found.values()
    assert (norm - 1).abs().max() <= 0.1
    decay = a_log.exp() * torch.nn.functional.softplus(dt_bias)
    assert ((decay > 0.01) & (decay < 2.0)).all()
    assert down.std().item() == pytest.approx(112**-0.5, rel=0.05)
    assert conv.std().item() == pytest.approx(0.5, rel=0.1)
    assert bias.abs().max() <= 0.02
    assert all(target.std() > 0 for target in found.values())


def test_dummy_weights_depend_on_name_and_seed_not_on_order() -> None:
    found, again, other = dummies(), dummies(), dummies(seed=4)
    backwards = {name: nan(*shape) for name, shape in reversed(DUMMY_SHAPES.items())}
    dummy_weights(backwards, 3)
    for name, target in found.items():
        assert torch.equal(target, again[name])
        assert torch.equal(target, backwards[name])
        assert not torch.equal(target, other[name])
    twins = {"x.a": nan(5, 5), "x.b": nan(5, 5)}
    dummy_weights(twins, 3)
    assert not torch.equal(twins["x.a"], twins["x.b"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dummy_weights_fill_other_dtypes_and_views(dtype: torch.dtype) -> None:
    assert all(target.isfinite().all() for target in dummies(dtype=dtype).values())
    merged = torch.nn.Parameter(nan(9, 4, dtype=dtype))
    dummy_weights({"q.weight": merged.narrow(0, 0, 6)}, 3)
    assert merged[:6].isfinite().all()
    assert merged[6:].isnan().all()


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_dummy_model_runs_with_finite_logits(name: str) -> None:
    _, model = tiny.build(name, scaled=False, seed=0)
    dummy_weights(model_targets(model), 3)
    found = run_reference(model, torch.arange(2, 40).view(1, -1), torch.float32)
    assert found.logits.isfinite().all()
    assert 0.1 < found.logits.std() < 10


class _NoFloat32(TorchFunctionMode):
    """Names the functions that return float32."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, Tensor) and value.dtype == torch.float32:
                self.found.add(func.__name__)
        return result


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_float64_reference_takes_no_float32_step(name: str) -> None:
    _, model = tiny.build(name, scaled=True, seed=tiny.VETTED_SEED)
    with _NoFloat32() as watch:
        run_reference(model.double(), torch.arange(2, 9).view(1, -1), torch.float64)
    assert watch.found == set()


@pytest.mark.parametrize(("name", "rotary_dim"), [("qwen3", 32), ("qwen3_5", 8)])
def test_float64_reference_rotates_by_float64_angles(name: str, rotary_dim: int) -> None:
    config, model = tiny.build(name, scaled=False, seed=0)
    cosines: list[Tensor] = []
    model.model.rotary_emb.register_forward_hook(lambda *call: cosines.append(call[-1][0]))
    run_reference(model, torch.full((1, 300), 5), torch.float64)
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    angles = 299 * config.rope_parameters["rope_theta"] ** -steps
    assert (cosines[0][0, -1, : rotary_dim // 2] - angles.cos()).abs().max() < 1e-12


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5"])
def test_references_agree_and_leave_no_trace(name: str) -> None:
    """A longer input changes nothing before it; float32 differs by float32's rounding only."""
    _, model = tiny.build(name, scaled=True, seed=tiny.VETTED_SEED)
    token_ids = torch.randint(2, 256, (2, 70), generator=torch.Generator().manual_seed(7))
    long, short = (run_reference(model, token_ids[:, :n], torch.float64) for n in (70, 61))
    single = run_reference(model, token_ids, torch.float32)
    assert len(long.layers) == len(single.layers) == 4
    for wide, cut in zip(long.layers, short.layers, strict=True):
        assert wide.dtype == torch.float64
        assert (wide[:, :61] - cut).abs().max() < 1e-12
    assert 1e-7 < (long.logits - single.logits).abs().max() < 1e-3
    assert torch.get_default_dtype() == torch.float32
    assert next(model.parameters()).dtype == torch.float32
