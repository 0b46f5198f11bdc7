"""`gapless inspect`: its bytes are those that are allocated, and what it says to fit does."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import torch
import transformers

from gapless import EngineOptions
from gapless.assets import demo_checkpoint
from gapless.cache.limits import CacheLimits
from gapless.cache.manager import CacheManager
from gapless.cli.inspect import Room, fit, parse_size
from gapless.config.config import Config, DeviceInfo
from gapless.config.hf import read_hf_config
from gapless.config.resolve import resolve
from gapless.core.architecture import Architecture, LayerSpec
from gapless.core.footprint import Footprint, human, num_active_parameters
from gapless.core.specs.feed_forward import MlpSpec, MoeSpec
from gapless.errors import ConfigError
from gapless.layers.placement import Placement
from gapless.models.mtp import MtpHead
from gapless.models.registry import model_module, read_architecture
from gapless.ops.skinny_linear import Float8Matrix
from tests.models import tiny
from tests.pool_bytes import num_bytes, pool_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Run

# float32 is the default on the device that tests have
OPTIONS: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "page_size": 3, "linear_replayssm_cache_len": 1},
    {"dtype": "float64", "page_size": 64, "linear_replayssm_cache_len": 5},
    {"dtype": "bfloat16", "ssm_dtype": "bfloat16", "max_running_requests": 5},
]
LINEAR_OPTIONS = {"ssm_dtype", "linear_replayssm_cache_len"}


def write_config(name: str, directory: Path, **changes: Any) -> Path:
    """Write the config of a tiny model, and nothing else, into a directory."""
    model = tiny.MODELS[name]
    config = getattr(transformers, model.config_class)(**model.options)
    config.save_pretrained(directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def describe(directory: Path) -> Architecture:
    return read_architecture(read_hf_config(directory))


def make_config(spec: Architecture, *, free: int = 2**30, **options: Any) -> Config:
    """Resolve options for plain decoding on a CPU with `free` bytes."""
    return resolve(
        EngineOptions.from_dict(options), spec, None, DeviceInfo("cpu", free, num_threads=1),
        has_mtp_weights=False,
    )  # fmt: skip


def flags(options: dict[str, Any]) -> list[str]:
    return [
        word
        for key, value in options.items()
        for word in (f"--{key.replace('_', '-')}", str(value))
    ]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", tiny.MODELS)
def test_bytes_are_those_of_the_pools(
    run: Run, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    spec = describe(write_config(name, tmp_path))
    if not spec.linear_layers:
        options = {key: value for key, value in options.items() if key not in LINEAR_OPTIONS}
    done = run("inspect", str(tmp_path), "--json", "--num-drafts", "4", *flags(options))
    found = json.loads(done.out)["sizes"]
    assert [sizes["num_drafts"] for sizes in found] == [0, 4]
    config = make_config(spec, **options)
    for sizes in found:
        assert sizes["page_bytes"] == config.page_size * sizes["kv_bytes_per_token"]
        for running, snapshots, pages in ((1, 0, 1), (config.max_running_requests, 3, 7)):
            sized = replace(
                config,
                max_running_requests=running,
                num_state_rows=running + snapshots,
                num_pages=pages,
                max_window=1 + sizes["num_drafts"],
            )
            assert pool_bytes(spec, sized) == (
                sizes["fixed_bytes"]
                + (running + snapshots) * sizes["row_bytes"]
                + running * sizes["ring_bytes_per_request"]
                + pages * sizes["page_bytes"]
            )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", tiny.MODELS)
def test_bytes_are_those_of_the_weights(tmp_path: Path, name: str, device: str, dtype: str) -> None:
    spec = describe(write_config(name, tmp_path))
    footprint = make_footprint(spec, device=device, dtype=dtype)
    # what lies on no CPU is laid out as on a GPU
    place = Placement(torch.device("cpu" if device == "cpu" else "meta"), vars(torch)[dtype])
    model = model_module(spec.model_type).build(spec, place, num_positions=3)
    found = list(model.targets(()).values())
    if model._head is not model._embedding and spec.ties_embeddings:
        found.append(model._head)
    by_dtype = {str(t.dtype).removeprefix("torch."): 0 for t in found}
    for tensor in found:
        by_dtype[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
    assert footprint.weight_bytes_by_dtype == by_dtype
    assert footprint.weight_bytes == num_bytes(found)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied"])
def test_bytes_of_the_drafts_head_are_those_of_its_copy(
    tmp_path: Path, name: str, dtype: str, world_size: int
) -> None:
    spec = replace(describe(write_config(name, tmp_path)), num_mtp_layers=1)
    sizes = make_footprint(
        spec, dtype=dtype, max_window=4, world_size=world_size, has_float8_head=True
    )
    rows = -(-spec.vocab_size // world_size)
    copy = Float8Matrix.of(torch.ones(rows, spec.hidden_size))
    taken = num_bytes([copy.values, copy.scales])
    assert sizes.draft_head_bytes == sizes.weight_bytes_by_dtype["float8"] == taken
    without = replace(sizes, has_float8_head=False)
    assert sizes.weight_bytes - without.weight_bytes == taken
    # who does not draft with MTP layers keeps none
    for other in (replace(sizes, max_window=1), replace(sizes, uses_mtp=False)):
        assert other.draft_head_bytes == 0
        assert "float8" not in other.weight_bytes_by_dtype


def test_the_drafts_head_is_shown(run: Run) -> None:
    here = ("inspect", "--memory", "1GiB")
    gpu = (*here, "--device", "cuda")
    label = "head in float8 for drafts"
    for argv in (gpu, (*here, "--draft-head-dtype", "fp8")):
        plain, speculative = json.loads(run(*argv, "--json").out)["sizes"]
        assert plain["draft_head_bytes"] == 0 < speculative["draft_head_bytes"]
        assert label in run(*argv).out
    off = ("--draft-head-dtype", "model")
    for argv in (here, (*gpu, *off), (*gpu, "--speculative-algorithm", "ngram")):
        assert label not in run(*argv).out
    done = run(*here, "--speculative-algorithm", "ngram", *off)
    assert "draft_head_dtype=model has no effect without the MTP drafter" in done.err


@pytest.mark.parametrize("algorithm", ["auto", "mtp", "ngram"])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_mtp_layers_count_when_they_draft(
    run: Run, tmp_path: Path, name: str, algorithm: str
) -> None:
    write_config(name, tmp_path, mtp_num_hidden_layers=1)
    spec = describe(tmp_path)
    options = {"dtype": "bfloat16", "max_running_requests": 2}
    asked = {"speculative_algorithm": algorithm, "speculative_num_steps": 2}
    done = run("inspect", str(tmp_path), "--json", *flags(options | asked))
    found = json.loads(done.out)
    plain, speculative = found["sizes"]
    assert speculative["num_drafts"] == 2
    layers = MtpHead(spec, Placement(torch.device("cpu"), torch.bfloat16)).targets(())
    assert found["model"]["mtp_parameters"] == sum(t.numel() for t in layers.values())
    added = speculative["weight_bytes"] - plain["weight_bytes"]
    assert added == (0 if algorithm == "ngram" else num_bytes(layers.values()))
    assert plain["mtp_kv_bytes_per_token"] == 0
    drafter = "ngram" if algorithm == "ngram" else "mtp"
    config = replace(
        make_config(spec, **options), max_window=3, num_pages=3, num_state_rows=7, drafter=drafter
    )
    assert pool_bytes(spec, config) == (
        speculative["fixed_bytes"]
        + 7 * speculative["row_bytes"]
        + 2 * speculative["ring_bytes_per_request"]
        + 3 * speculative["page_bytes"]
    )


def test_sizes_with_a_tree_are_those_of_its_window(run: Run, tmp_path: Path) -> None:
    flags_of_tree = ("--speculative-topk", "2", "--speculative-num-draft-tokens", "10")
    path = str(write_config("qwen3_5", tmp_path))
    done = run("inspect", path, "--json", "--num-drafts", "3", *flags_of_tree)
    _, speculative = json.loads(done.out)["sizes"]
    assert speculative["num_drafts"] == 9
    assert speculative["ring_entries"] == 16 + 2 * 10


def make_footprint(spec: Architecture, **changes: Any) -> Footprint:
    settings = {
        "device": "cpu", "dtype": "bfloat16", "ssm_dtype": "float32", "page_size": 3,
        "replay_len": 5, "max_window": 1,
    }  # fmt: skip
    return Footprint(architecture=spec, **{**settings, **changes})


@pytest.mark.parametrize("window", [1, 2, 5])
@pytest.mark.parametrize("limit_len", [2, 3, 4, 5, 64])
def test_pages_of_a_request_are_those_the_scheduler_needs(
    tmp_path: Path, window: int, limit_len: int
) -> None:
    footprint = make_footprint(describe(write_config("qwen3_5", tmp_path)), max_window=window)
    manager = CacheManager(
        CacheLimits(num_pages=1, page_size=3, num_state_rows=1, max_window=window)
    )
    pages = manager.num_pages_at_limit(limit_len)
    assert footprint.num_pages(limit_len) == pages
    longest = footprint.longest_request(pages)
    assert manager.num_pages_at_limit(longest) == pages
    assert manager.num_pages_at_limit(longest + 1) == pages + 1


@pytest.mark.parametrize("max_running", [None, 3, 400])
@pytest.mark.parametrize("window", [1, 4])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3"])
def test_what_fits_fits_and_no_more(
    tmp_path: Path, name: str, window: int, max_running: int | None
) -> None:
    spec = describe(write_config(name, tmp_path, max_position_embeddings=5000))
    footprint = make_footprint(spec, max_window=window)
    budget, full = 12 * 2**20, 5000
    found = fit(footprint, Room(budget, budget, full, max_running))
    config = make_config(spec, dtype="bfloat16", page_size=3, max_model_len=8)
    config = replace(config, replay_len=5, max_window=window)

    def total(requests: int, length: int) -> int:
        rows = requests if max_running is None else max_running
        pages = requests * footprint.num_pages(length)
        sized = replace(config, max_running_requests=rows, num_state_rows=rows, num_pages=pages)
        return footprint.weight_bytes + pool_bytes(spec, sized)

    assert list(found.requests) == [5000, 4096]
    for length, requests in found.requests.items():
        assert total(requests, length) <= budget or requests == 0
        assert requests <= (max_running or requests)
        assert requests == max_running or total(requests + 1, length) > budget
    longest = found.largest_context
    assert 0 <= longest <= full
    if longest:
        assert total(1, longest) <= budget
    if longest < full:
        assert total(1, max(2, longest + 1)) > budget


def test_too_little_memory_fits_nothing(run: Run) -> None:
    done = run("inspect", "--memory", "1MB", "--json")
    for sizes in json.loads(done.out)["sizes"]:
        assert sizes["requests"] == {"4096": 0}
        assert sizes["largest_context"] == 0


def test_largest_context_is_the_most_that_an_engine_accepts(run: Run, tmp_path: Path) -> None:
    spec = describe(write_config("qwen3_5", tmp_path))
    options = {"max_running_requests": 1, "mem_fraction": 0.75}
    footprint = make_footprint(spec, dtype="float32", page_size=16, replay_len=16)
    # not for the model's 512 tokens
    wanted = footprint.weight_bytes + footprint.pool_bytes(num_requests=1, num_pages=20)
    memory = int(wanted / 0.75) + 2
    done = run("inspect", str(tmp_path), "--json", "--memory", str(memory), *flags(options))
    (largest, _) = (sizes["largest_context"] for sizes in json.loads(done.out)["sizes"])
    config = make_config(spec, free=memory, disable_prefix_cache=True, **options)
    assert config.max_model_len == largest == 321
    make_config(spec, free=memory, max_model_len=largest, **options)
    with pytest.raises(ConfigError, match="one request of 322 tokens needs"):
        make_config(spec, free=memory, max_model_len=largest + 1, **options)


@pytest.mark.parametrize("free", [600_000, 1_300_000, 5_000_000])
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied", "qwen3"])
def test_the_engine_is_given_what_is_shown(run: Run, tmp_path: Path, name: str, free: int) -> None:
    spec = describe(write_config(name, tmp_path))
    options = {"mem_fraction": 1.0, "max_running_requests": 4}
    shown = ("inspect", str(tmp_path), "--memory", str(free), "--num-drafts", "0", *flags(options))
    engine = json.loads(run(*shown, "--json").out)["sizes"][0]["engine"]
    text = run(*shown).out
    if "refused" in engine:
        with pytest.raises(ConfigError) as refused:
            make_config(spec, free=free, **options)
        assert engine == {"refused": str(refused.value)}
        assert f"An engine refuses: {refused.value}" in text
        return
    config = make_config(spec, free=free, **options)
    assert engine["max_running_requests"] == config.max_running_requests
    assert engine["num_pages"] == config.num_pages
    assert engine["num_snapshots"] + config.max_running_requests == config.num_state_rows
    sizes = engine["bytes"]
    assert sum(sizes.values()) == free
    assert free - sizes["free"] - sizes["weights"] == pool_bytes(spec, config)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"free {human(sizes['free'])}" in lines
    assert f"running rows {human(sizes['running rows'])} ({config.max_running_requests})" in lines


def test_active_parameters_leave_out_idle_experts(tmp_path: Path) -> None:
    spec = describe(write_config("qwen3_5", tmp_path))
    assert num_active_parameters(spec) == spec.num_parameters
    layers = tuple(
        LayerSpec(layer.mixer, MoeSpec(8, 3, 40, 48, renormalises=True) if i else layer.mlp)
        for i, layer in enumerate(spec.layers)
    )
    sparse = replace(spec, layers=layers)
    # three experts and the shared one together, the shared one's gate and the router
    used = tuple(
        LayerSpec(layer.mixer, MlpSpec(3 * 40 + 48) if i else layer.mlp)
        for i, layer in enumerate(spec.layers)
    )
    gates = 3 * (8 + 1) * spec.hidden_size
    expected = replace(spec, layers=used).num_parameters + gates
    assert num_active_parameters(sparse) == expected < sparse.num_parameters


def test_bundled_model(run: Run) -> None:
    done = run("inspect", "--memory", "1GiB", "--page-size", "8")
    assert (done.status, done.err) == (0, "")
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    for line in (
        "layers 6 gated delta, 2 full attention, 1 MTP",
        "parameters 7,107,504; 886,144 more for MTP",
        "context 4,096 tokens",
        "page of 8 tokens 16.0 KiB 24.0 KiB",
        "replay ring entries 18 24",
        "In 512.0 MiB of 1.0 GiB, with state rows and rings for as many requests as run:",
        "requests of 4,096 tokens, the full length 55 37",
    ):
        assert line in lines


def test_sizes_with_drafts_can_be_left_out(run: Run) -> None:
    done = run("inspect", "--num-drafts", "0")
    assert done.status == 0
    assert "drafts" not in done.out
    assert "MTP KV" not in done.out
    assert "drafts" not in run("inspect", "--speculative-algorithm", "none").out
    for flag in ("--num-drafts", "--speculative-num-steps"):
        assert "2 drafts" in run("inspect", flag, "2").out
    assert "3 drafts" in run("inspect").out


def test_directory_and_bare_config_say_the_same(run: Run, tmp_path: Path) -> None:
    write_config("qwen3", tmp_path / "model")
    elsewhere = tmp_path / "other.json"
    elsewhere.write_text((tmp_path / "model" / "config.json").read_text())
    outputs = []
    for argv in ((str(tmp_path / "model"),), (str(elsewhere),), ("--model", str(elsewhere))):
        done = run("inspect", *argv, "--memory", "1GiB", "--json")
        found = json.loads(done.out)
        outputs.append((found, found["model"].pop("config")))
    assert [path.rpartition("/")[2] for _, path in outputs] == [
        "config.json", "other.json", "other.json"
    ]  # fmt: skip
    assert outputs[0][0] == outputs[1][0] == outputs[2][0]
    assert outputs[0][0]["model"]["layers"] == {"full attention": 4}
    text = run("inspect", str(elsewhere)).out
    assert "recurrent" not in text
    assert "rings, per" not in text


def test_multimodal_wrapper(run: Run, tmp_path: Path) -> None:
    text = json.loads((write_config("qwen3_5", tmp_path / "text") / "config.json").read_text())
    wrapper = {
        "model_type": "qwen3_5",
        "text_config": text | {"mtp_num_hidden_layers": 1},
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 2, "hidden_size": 8},
    }
    (tmp_path / "config.json").write_text(json.dumps(wrapper))
    done = run("inspect", str(tmp_path))
    assert done.status == 0
    assert "model         qwen3_5_text inside qwen3_5, " in done.out
    assert "layers        3 gated delta, 1 full attention, 1 MTP" in done.out


def test_of_a_hub_model_only_the_config_is_fetched(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fetch(*args: str, **options: Any) -> str:
        calls.append((args, options))
        return str(demo_checkpoint() / "config.json")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    done = run("inspect", "org/name", "--revision", "v2", "--json")
    assert calls == [(("org/name", "config.json"), {"revision": "v2"})]
    assert json.loads(done.out)["model"]["parameters"] == 7_107_504


def test_hub_without_a_config(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*args: str, **options: Any) -> str:
        kind = huggingface_hub.errors.RemoteEntryNotFoundError
        # made without __init__, which wants a response of the HTTP client
        raise kind.__new__(kind, "no entry")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    done = run("inspect", "org/name")
    assert done.status == 2
    assert "ModelError: model 'org/name' has no config.json; name a checkpoint" in done.err


def test_a_gpu_that_is_not_here(run: Run) -> None:
    done = run("inspect", "--device", "cuda", "--memory", "80GiB", "--json")
    found = json.loads(done.out)
    assert found["settings"]["dtype"] == "bfloat16"
    assert found["room"]["budget_bytes"] == int(0.9 * 80 * 2**30)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("/nowhere",), "ModelError: /nowhere does not exist; want a directory or a hub id: check"),
        (("gone/config.json",), "ModelError: gone/config.json does not exist; want a config.json"),
        (("a", "--model", "b"), "ConfigError: MODEL 'a' and model='b' were both given; give one"),
        (("--memory", "80 parsec"), "ConfigError: memory='80 parsec': want a number above 0 and"),
        (("--num-drafts", "-1"), "ConfigError: num_drafts=-1: want 0 to 15"),
        (("--num-drafts", "16"), "ConfigError: num_drafts=16: want 0 to 15"),
        (
            ("--num-drafts", "2", "--speculative-num-steps", "3"),
            "ConfigError: num_drafts=2 and speculative_num_steps=3 were both given; give one",
        ),
        (
            ("--speculative-topk", "2", "--speculative-num-draft-tokens", "12"),
            "ConfigError: speculative_num_draft_tokens=12: with speculative_topk=2 and",
        ),
        (
            ("--speculative-algorithm", "none", "--speculative-topk", "2"),
            "ConfigError: speculative_topk=2 has no effect without a drafter; leave it out",
        ),
        (
            ("--speculative-num-steps", "0", "--speculative-num-draft-tokens", "4"),
            "ConfigError: speculative_num_draft_tokens=4 has no effect without a drafter; leave",
        ),
        (
            ("--num-drafts", "0", "--speculative-topk", "2"),
            "ConfigError: speculative_topk=2 has no effect without a drafter; leave it out",
        ),
        (
            ("--speculative-algorithm", "ngram", "--speculative-topk", "2"),
            "ConfigError: speculative_topk=2: speculative_algorithm=ngram drafts chains only; use",
        ),
        (
            ("--speculative-algorithm", "none", "--draft-head-dtype", "fp8"),
            "ConfigError: draft_head_dtype=fp8 has no effect without the MTP drafter, the only",
        ),
        (("--speculative-topk", "0"), "ConfigError: speculative_topk=0: want an integer of at"),
        (
            ("--speculative-algorithm", "mtp", "--speculative-num-steps", "0"),
            "ConfigError: speculative_algorithm=mtp drafts nothing with speculative_num_steps=0",
        ),
        (("--page-size", "0"), "ConfigError: page_size=0: want an integer of at least 1"),
        (("--revision", "v2"), "ConfigError: revision='v2' has no effect on the bundled model"),
    ],
)
def test_mistakes_are_one_line(run: Run, argv: tuple[str, ...], line: str) -> None:
    done = run("inspect", *argv)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"gapless: {line}")
    assert done.err.count("\n") == 1


def test_other_files_and_other_models_are_refused(run: Run, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"")
    assert "is a file, want the directory that" in run("inspect", str(weights)).err
    assert "does not exist" in run("inspect", str(tmp_path)).err
    config = write_config("qwen3", tmp_path / "model", model_type="gpt9") / "config.json"
    assert "model_type 'gpt9' is not supported" in run("inspect", str(config)).err
    done = run("inspect", str(config), "--revision", "v2")
    assert "revision='v2' has no effect on a file; leave it out" in done.err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 2**30),
        ("1.5 gb", 1_500_000_000),
        (" 3 KiB ", 3072),
        ("2TB", 2 * 10**12),
        ("1000", 1000),
        ("7B", 7),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1e9", "0", "1 G B", "nan", "1.GiB", "80G"])
def test_wrong_sizes_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="want a number above 0 and a unit"):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"),
        (2**20 - 1, "1024.0 KiB"), (2**30, "1.0 GiB"), (3 * 2**50, "3072.0 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_shown(size: int, text: str) -> None:
    assert human(size) == text
