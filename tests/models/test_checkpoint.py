"""Finding checkpoints and their weight files, and the tiny checkpoints that other tests use."""

from __future__ import annotations

import json
import pickle
from typing import TYPE_CHECKING, Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils._paths import filter_repo_objects

from gapless.config.hf import read_hf_config
from gapless.errors import ConfigError, ModelError, UnsupportedModel
from gapless.models.checkpoint import resolve_checkpoint, weight_files
from tests.models import tiny
from tests.models.reference import logits

if TYPE_CHECKING:
    from pathlib import Path


def touch(directory: Path, *names: str) -> Path:
    for name in names:
        (directory / name).write_bytes(b"")
    return directory


def write_index(directory: Path, weight_map: Any) -> None:
    content = json.dumps({"metadata": {}, "weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(content)


class _Hub:
    """Stands in for the download: returns or raises what a test wants, and keeps the arguments."""

    def __init__(self, outcome: str | Exception) -> None:
        self.outcome = outcome
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, model: str, **options: Any) -> str:
        self.calls.append((model, options))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_directory_is_returned_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = _Hub("elsewhere")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_checkpoint(str(tmp_path), revision=None) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_checkpoint("org/name", revision=None).is_dir()
    assert hub.calls == []


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_checkpoint("~/mine", revision=None) == tmp_path / "mine"


def test_wrong_paths_are_refused_without_asking_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = _Hub("elsewhere")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    touch(tmp_path, "model.safetensors")
    with pytest.raises(ModelError, match=rf"is a file.*pass {tmp_path}"):
        resolve_checkpoint(str(tmp_path / "model.safetensors"), revision=None)
    for path in (str(tmp_path / "nowhere"), "./nowhere", "../a/b", "~/nowhere", "a/b/c", "a\\b"):
        with pytest.raises(ModelError, match=r"does not exist.*check the path"):
            resolve_checkpoint(path, revision=None)
    with pytest.raises(ConfigError, match="revision='main'"):
        resolve_checkpoint(str(tmp_path), revision="main")
    assert hub.calls == []


def test_hub_id_downloads_safetensors_and_never_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = _Hub(str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve_checkpoint("org/name", revision="v2") == tmp_path
    ((model, options),) = hub.calls
    assert (model, options["revision"]) == ("org/name", "v2")
    wanted = ["config.json", "generation_config.json", "model-00001-of-00002.safetensors"]
    wanted += ["model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    wanted += [
        "merges.txt",
        "vocab.json",
        "tokenizer.model",
        "qwen.tiktoken",
        "chat_template.jinja",
    ]
    unwanted = ["pytorch_model.bin", "a.pt", "consolidated.00.pth", "last.ckpt", "modeling_x.py"]
    unwanted += ["original/model.safetensors", "onnx/config.json", "README.md"]
    patterns = {key: options[key] for key in ("allow_patterns", "ignore_patterns")}
    kept = set(filter_repo_objects(wanted + unwanted, **patterns))
    assert kept == set(wanted)


def http_error(kind: type[Exception]) -> Exception:
    # made without __init__, which wants a response of whichever HTTP client the hub library uses
    return kind.__new__(kind, "refused")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (hub_errors.HFValidationError("bad id"), "neither a directory nor a valid hub id"),
        (http_error(hub_errors.GatedRepoError), "gated.*log in"),
        (http_error(hub_errors.RepositoryNotFoundError), "nor a hub checkpoint.*spelling"),
        (http_error(hub_errors.RevisionNotFoundError), "no revision 'v2'"),
        (http_error(hub_errors.HfHubHTTPError), "cannot be downloaded.*network"),
        (hub_errors.OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE forbids"),
        (hub_errors.LocalEntryNotFoundError("no copy"), "cannot be reached.*network"),
        (ConnectionError("reset"), "cannot be downloaded"),
        (OSError(28, "no space left"), "free space"),
    ],
)
def test_hub_errors_name_the_model_and_a_remedy(
    monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _Hub(error))
    with pytest.raises(ModelError, match=f"'org/name' .*{problem}") as caught:
        resolve_checkpoint("org/name", revision="v2")
    assert type(error).__name__ in str(caught.value)
    assert caught.value.__cause__ is error


def test_other_errors_of_the_download_are_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", _Hub(TypeError("a bug")))
    with pytest.raises(TypeError, match="a bug"):
        resolve_checkpoint("org/name", revision=None)


def test_single_file_wins(tmp_path: Path) -> None:
    touch(tmp_path, "model.safetensors", "extra.safetensors", "pytorch_model.bin")
    write_index(tmp_path, {"a": "gone.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_index_names_the_shards_each_once(tmp_path: Path) -> None:
    touch(tmp_path, "b.safetensors", "a.safetensors", "stray.safetensors")
    write_index(tmp_path, {"x": "b.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def test_several_files_without_an_index(tmp_path: Path) -> None:
    touch(tmp_path, "b.safetensors", "a.safetensors")
    assert weight_files(tmp_path) == [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]


def test_missing_shards_are_named(tmp_path: Path) -> None:
    touch(tmp_path, "a.safetensors")
    write_index(tmp_path, {f"t{i}": f"{name}.safetensors" for i, name in enumerate("abc")})
    with pytest.raises(ModelError, match=r"3 shards, 2 of them missing: b\.safetensors, c\.safe"):
        weight_files(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"a": 5}, {"a": "../secret.safetensors"}])
def test_damaged_index_is_refused(tmp_path: Path, weight_map: Any) -> None:
    touch(tmp_path.parent, "secret.safetensors")
    write_index(tmp_path, weight_map)
    with pytest.raises(ModelError, match=r"index\.json.*want .*; download"):
        weight_files(tmp_path)


def test_index_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("<html>")
    with pytest.raises(ModelError, match=r"index\.json is no valid JSON"):
        weight_files(tmp_path)


def test_config_without_weights(tmp_path: Path) -> None:
    touch(tmp_path, "config.json", "tokenizer.json")
    with pytest.raises(ModelError, match=r"config without weights.*download"):
        weight_files(tmp_path)


class _Bomb:
    """An object whose unpickling creates a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.marker), "w"))


@pytest.mark.parametrize(
    "name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt"]
)
def test_pickles_are_refused_and_never_opened(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "marker"
    (tmp_path / name).write_bytes(pickle.dumps(_Bomb(marker)))
    with pytest.raises(UnsupportedModel, match=rf"pickled weights \({name}.*convert them"):
        weight_files(tmp_path)
    assert not marker.exists()
    pickle.loads((tmp_path / name).read_bytes()).close()
    assert marker.exists(), "the pickle would have shown that it was opened"


def test_pickles_in_the_index_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.bin")
    write_index(tmp_path, {"x": "a.bin"})
    with pytest.raises(UnsupportedModel, match=r"'a\.bin'"):
        weight_files(tmp_path)


@pytest.mark.parametrize("name", tiny.MODELS)
def test_config_of_a_tiny_model_is_read_as_transformers_means_it(tmp_path: Path, name: str) -> None:
    config, model = tiny.build(name, scaled=False, seed=0)
    found = read_hf_config(tiny.save(model, tmp_path))
    assert found.model_type == config.model_type
    assert found.ties_embeddings is config.tie_word_embeddings
    values = config.to_dict()
    if name != "kimi_linear" and "rope_parameters" in values:  # others rotate nothing
        rope = config.rope_parameters
        assert (found.rope.theta, found.rope.rope_type) == (rope["rope_theta"], rope["rope_type"])
        assert found.rope.rotary_factor == rope.get("partial_rotary_factor", 1.0)
    if config.model_type != "nemotron_h":  # whose list its own file reads
        kinds = values.get("layer_types", ["full_attention"] * config.num_hidden_layers)
        assert list(found.layer_types(tuple(kinds))) == kinds
    assert found.dtype == "float32"
    if "kv_lora_rank" in found.values:
        assert found.integer("qk_rope_head_dim") == tiny.LATENT["qk_rope_head_dim"]
    elif "head_dim" in values:
        assert found.integer("head_dim") == tiny.HEAD_DIM
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_tiny_models_tell_dimensions_apart() -> None:
    config, _ = tiny.build("qwen3_5", scaled=False, seed=0)
    assert config.linear_key_head_dim != config.linear_value_head_dim
    assert config.linear_num_key_heads != config.linear_num_value_heads
    assert config.num_attention_heads * config.head_dim != config.hidden_size


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _, first = tiny.build("qwen3", scaled=True, seed=1)
    assert torch.equal(torch.rand(3), expected)
    _, second = tiny.build("qwen3", scaled=True, seed=1)
    _, other = tiny.build("qwen3", scaled=True, seed=2)
    assert torch.equal(first.lm_head.weight, second.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_tied"])
def test_hub_style_is_what_transformers_takes_for_the_same_model(tmp_path: Path, name: str) -> None:
    _, model = tiny.build(name, scaled=True, seed=tiny.VETTED_SEED)
    hub = tiny.hub_style(tiny.save(model, tmp_path / "plain"), tmp_path / "hub")
    classes: Any = transformers
    loaded, info = classes.Qwen3_5ForCausalLM.from_pretrained(hub, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    token_ids = torch.arange(2, 15)[None]
    expected = logits(model, token_ids, torch.float32)
    assert torch.equal(logits(loaded.eval(), token_ids, torch.float32), expected)
    found = read_hf_config(hub)
    assert (found.model_type, found.wrapper_type) == ("qwen3_5_text", "qwen3_5")
    assert found.ties_embeddings is name.endswith("_tied")
    assert len(weight_files(hub)) == 3
    num_mtp_tensors = 15  # what the hub's dense checkpoints have
    assert sum(key.startswith("mtp.") for key in tiny.stored_weights(hub)) == num_mtp_tensors
