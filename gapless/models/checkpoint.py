"""Finds a checkpoint's directory and its weight files; reads no weights.

Only safetensors are served. Pickled weights run code when they are opened, so they are neither
downloaded nor opened.
"""

from __future__ import annotations

from pathlib import Path

import huggingface_hub

# HTTPError is the HTTP client's, the base of what escapes the hub's own classes
from huggingface_hub.errors import (  # type: ignore[attr-defined]
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from gapless.config.hf.checked import read_json_object
from gapless.config.hf.read import CONFIG_FILE
from gapless.errors import ConfigError, ModelError, UnsupportedModel

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt")
# folders hold other formats of the same weights; pickles are refused, so not worth their bytes
NOT_DOWNLOADED = ("*/*", "*.bin", "*.pt", "*.pth", "*.ckpt")

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def resolve_checkpoint(model: str, *, revision: str | None) -> Path:
    """Return the local directory of a checkpoint, downloading a hub id's files first.

    Args:
        model: a directory, or a hub id such as "Qwen/Qwen3-0.6B"; a directory wins.
        revision: branch, tag or commit of a hub checkpoint.

    Raises:
        ConfigError: a revision is given for a directory.
        ModelError: there is no such directory or hub checkpoint, or it cannot be reached.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"revision={revision!r} is given with the directory {path}; want a hub id with "
                "it: leave the revision out"
            )
        return path
    if path.exists():
        raise ModelError(
            f"{path} is a file, want the directory that holds config.json and *.safetensors: "
            f"pass {path.parent}"
        )
    if _looks_like_a_path(model):
        raise ModelError(f"{path} does not exist; want a directory or a hub id: check the path")
    return _download(model, revision)


def resolve_config(model: str, *, revision: str | None) -> Path:
    """Return the path to read a checkpoint's config from, downloading no other file of a hub id.

    Args:
        model: a directory, a JSON file in place of its config.json, or a hub id.
        revision: branch, tag or commit of a hub checkpoint.

    Raises:
        ConfigError: a revision is given for a local path.
        ModelError: there is no such file, directory or hub checkpoint, or it cannot be reached.
    """
    path = Path(model).expanduser()
    if path.suffix == ".json" and not path.is_dir():
        if not path.is_file():
            raise ModelError(f"{path} does not exist; want a config.json: check the path")
        if revision is not None:
            raise ConfigError(f"revision={revision!r} has no effect on a file; leave it out")
        return path
    if path.exists() or _looks_like_a_path(model):
        return resolve_checkpoint(model, revision=revision)
    try:
        return Path(huggingface_hub.hf_hub_download(model, CONFIG_FILE, revision=revision))
    except (OSError, ValueError, HTTPError) as error:
        raise _hub_error(model, revision, error) from error


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that together hold a checkpoint's weights.

    `model.safetensors`, else the shards that the index names, else all `*.safetensors`.

    Raises:
        ModelError: there are no weights, or a shard that the index names is missing.
        UnsupportedModel: there are only pickled weights.
    """
    single = directory / SINGLE_FILE
    if single.is_file():
        return [single]
    index = directory / INDEX_FILE
    if index.is_file():
        return _indexed_files(index)
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(p.name for p in directory.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise UnsupportedModel(
            f"{directory} holds only pickled weights ({', '.join(pickles[:3])}), which run code "
            "when opened and are refused; want *.safetensors: convert them where you trust them, "
            "with AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers"
        )
    raise ModelError(
        f"{directory} holds a config without weights; want {SINGLE_FILE} or shards with "
        f"{INDEX_FILE}: download the checkpoint again, or use load_format='dummy'"
    )


def _looks_like_a_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~")) or "\\" in model or model.count("/") > 1


def _download(model: str, revision: str | None) -> Path:
    """Fetch a hub checkpoint into the local hub cache; offline, the cached copy serves."""
    try:
        return Path(
            huggingface_hub.snapshot_download(
                model,
                revision=revision,
                allow_patterns=list(DOWNLOADED),
                ignore_patterns=list(NOT_DOWNLOADED),
            )
        )
    except (OSError, ValueError, HTTPError) as error:
        raise _hub_error(model, revision, error) from error


def _hub_error(model: str, revision: str | None, error: Exception) -> ModelError:
    """Say what went wrong with the hub and what to do; specific errors come before their bases."""
    if isinstance(error, HFValidationError):
        problem, remedy = "is neither a directory nor a valid hub id", "check the spelling"
    elif isinstance(error, GatedRepoError):
        problem = "is a gated hub checkpoint"
        remedy = "accept its terms on its page, then log in with `hf auth login` or set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        problem = "is neither a directory nor a hub checkpoint that you can read"
        remedy = "check the spelling; for a private one log in with `hf auth login`"
    elif isinstance(error, RevisionNotFoundError):
        problem = f"has no revision {revision!r}"
        remedy = "name a branch, tag or commit that its page lists"
    elif isinstance(error, OfflineModeIsEnabled):
        problem = "is not in the local hub cache, and HF_HUB_OFFLINE forbids downloads"
        remedy = "unset it, or pass a local directory"
    elif isinstance(error, LocalEntryNotFoundError):
        problem = "is not in the local hub cache, and the hub cannot be reached"
        remedy = "check the network and HF_HUB_OFFLINE, or pass a local directory"
    elif isinstance(error, EntryNotFoundError):
        problem = f"has no {CONFIG_FILE}"
        remedy = "name a checkpoint in Hugging Face format"
    elif isinstance(error, HTTPError | ConnectionError):
        problem = "cannot be downloaded"
        remedy = "check the network and try again, or pass a local directory"
    else:
        problem = "cannot be stored in the local hub cache"
        remedy = "check the free space and permissions of HF_HOME"
    return ModelError(f"model {model!r} {problem}; {remedy} ({type(error).__name__}: {error})")


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json_object(index).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(name, str) for name in weight_map.values())
    ):
        raise ModelError(
            f"{index}: weight_map is {weight_map!r}, want an object from tensor name to file "
            "name; download the checkpoint again"
        )
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name or name == ".."]
    if outside:
        raise ModelError(
            f"{index} names {outside[0]!r}, want files beside it; download the checkpoint again"
        )
    pickles = [name for name in names if not name.endswith(".safetensors")]
    if pickles:
        raise UnsupportedModel(
            f"{index} names {pickles[0]!r}; want *.safetensors: convert the weights first"
        )
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"{index} names {len(names)} shards, {len(missing)} of them missing: "
            f"{', '.join(missing[:10])}; download the checkpoint again"
        )
    return [index.parent / name for name in names]
