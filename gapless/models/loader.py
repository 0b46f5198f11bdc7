"""Fills a model's tensors from safetensors files, or with made-up values.

Everything is checked against the files' headers before the first byte is copied: a checkpoint
either fits the model completely, or loading fails and names what does not fit.
"""

from __future__ import annotations

import hashlib
import logging
from contextlib import contextmanager
from dataclasses import dataclass
from re import fullmatch
from typing import TYPE_CHECKING, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gapless.errors import ModelError, UnsupportedModel, WeightMismatch
from gapless.layers.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gapless.layers.shard import Target

LOADABLE_DTYPES = ("F64", "F32", "BF16", "F16")

# stored prefix -> canonical prefix: multimodal checkpoints wrap the text model in two ways
TEXT_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)

MAX_LISTED = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class IgnoreRule:
    """Tensors that are recognised and not loaded."""

    pattern: str
    """Regular expression that the whole canonical name matches."""
    reason: str
    """Why they are not loaded, such as "vision: only text is served"; for one log line."""
    copy_of: str | None = None
    """Canonical name of a target that they must equal, such as tied embeddings for a head."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor by a file's header."""

    name: str
    """As the file spells it."""
    file: Path
    dtype: str
    """safetensors' name, such as "BF16"."""
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)} in {self.file.name}"


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did."""

    num_files: int
    num_tensors: int
    num_bytes: int
    """Bytes written, in the targets' dtypes."""
    ignored: Mapping[IgnoreRule, tuple[str, ...]]
    """Canonical names of the skipped tensors, by rule."""


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor: ...


class _OpenFile(Protocol):
    """The part of `safetensors.safe_open` that is used, which comes without types."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> Tensor: ...


def text_prefix(name: str) -> str:
    """Return the canonical name of a stored tensor: `model.layers...`, `lm_head.weight`.

    `model.language_model.layers...` and `language_model.model.layers...` become
    `model.layers...`; names outside the text model stay as they are.
    """
    for stored, canonical in TEXT_PREFIXES:
        if name.startswith(stored):
            return canonical + name.removeprefix(stored)
    return name


def stored_tensors(files: Sequence[Path]) -> list[StoredTensor]:
    """List the tensors of some safetensors files, reading headers only.

    Raises:
        ModelError: a file is missing, truncated or no safetensors file.
    """
    found: list[StoredTensor] = []
    for file in files:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                header = handle.get_slice(name)
                shape = tuple(header.get_shape())
                found.append(StoredTensor(name, file, header.get_dtype(), shape))
    return found


def load_weights(
    files: Sequence[Path],
    targets: Mapping[str, Target],
    *,
    canonical: Callable[[str], str],
    ignore: Sequence[IgnoreRule],
) -> LoadReport:
    """Copy every stored tensor into its target, one at a time, converting dtypes.

    Of a shard's tensor only the share is read. Host memory beyond the targets stays at one mapped
    file.

    Args:
        files: safetensors files that together hold the weights.
        targets: canonical name -> destination, written in place: a tensor or view of exactly the
            stored shape, or a shard of it, on its own device and in its own dtype.
        canonical: stored name -> canonical name.
        ignore: rules for tensors that are no targets; one log line for each that applied.

    Raises:
        ModelError: a file is truncated or no safetensors file.
        UnsupportedModel: a target is stored in a dtype that is not a plain float.
        WeightMismatch: a tensor is missing, unexpected, misshapen, stored twice, or differs from
            the target that its rule calls it a copy of. Except in that last case nothing has been
            written.
    """
    wanted: dict[str, list[StoredTensor]] = {}
    ignored: dict[IgnoreRule, dict[str, StoredTensor]] = {}
    unexpected: list[StoredTensor] = []
    for tensor in stored_tensors(files):
        name = canonical(tensor.name)
        rule = next((rule for rule in ignore if fullmatch(rule.pattern, name)), None)
        if name in targets:
            wanted.setdefault(name, []).append(tensor)
        elif rule is not None:
            ignored.setdefault(rule, {})[name] = tensor
        else:
            unexpected.append(tensor)
    _check_dtypes(wanted)
    _check_fit(wanted, targets, unexpected)
    for file in files:
        names = {tensor.name: name for name, (tensor,) in wanted.items() if tensor.file == file}
        _copy_file(file, {stored: targets[name] for stored, name in names.items()})
    for rule, skipped in ignored.items():
        _check_copies(rule, skipped, targets)
        shared = _shared_name(list(skipped))
        logger.info("skipped %d tensors (%s): %s", len(skipped), shared, rule.reason)
    return LoadReport(
        num_files=len(files),
        num_tensors=len(targets),
        num_bytes=sum(_held(target).nbytes for target in targets.values()),
        ignored={rule: tuple(skipped) for rule, skipped in ignored.items()},
    )


def dummy_weights(targets: Mapping[str, Target], seed: int) -> None:
    """Fill targets with small random values that keep activations finite; reads no files.

    A tensor's values depend on its name, shape, dtype, device and `seed`, not on the others. A
    shard's are its share of the whole tensor's, which is made up for a moment.
    """
    generators: dict[torch.device, torch.Generator] = {}
    with torch.no_grad():
        for name, target in targets.items():
            held = _held(target)
            generator = generators.get(held.device)
            if generator is None:
                generator = generators[held.device] = torch.Generator(held.device)
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(digest) >> 1)
            if isinstance(target, Shard):
                whole = _empty_stored(target)
                _fill_dummy(name, whole, generator)
                for piece, index in target.pieces():
                    piece.copy_(whole[index])
            else:
                _fill_dummy(name, target, generator)


def _empty_stored(shard: Shard) -> Tensor:
    """Make a tensor of the stored shape, its axes in memory in the shard's order."""
    held, shape = shard.tensor, shard.stored_shape
    # values are drawn in the order of memory
    if held.ndim == 2 and held.stride(0) < held.stride(1):
        return held.new_empty(shape[::-1]).t()
    return held.new_empty(shape)


def _fill_dummy(name: str, target: Tensor, generator: torch.Generator) -> None:
    if name.endswith("A_log"):
        target.uniform_(1.0, 16.0, generator=generator).log_()
    elif name.endswith("dt_bias"):
        # softplus of these lies between 0.02 and 0.1: decays that remember tens of tokens
        target.uniform_(-4.0, -2.25, generator=generator)
    elif target.ndim == 1 and name.endswith(".weight"):  # a norm
        target.uniform_(0.9, 1.1, generator=generator)
    elif target.ndim <= 1:
        target.uniform_(-0.02, 0.02, generator=generator)
    else:
        # variance 1 / fan-in, so that a projection keeps its input's scale
        bound = (3.0 / max(1, target.shape[-1])) ** 0.5
        target.uniform_(-bound, bound, generator=generator)


def _check_dtypes(wanted: Mapping[str, Sequence[StoredTensor]]) -> None:
    stored = [tensor for tensors in wanted.values() for tensor in tensors]
    packed = [tensor for tensor in stored if tensor.dtype not in LOADABLE_DTYPES]
    if packed:
        raise UnsupportedModel(
            f"{len(packed)} tensors are stored in a dtype that is not supported: "
            f"{_listed([str(tensor) for tensor in packed])}; want {', '.join(LOADABLE_DTYPES)}: "
            "serve the unquantised checkpoint of this model"
        )


def _check_fit(
    wanted: Mapping[str, Sequence[StoredTensor]],
    targets: Mapping[str, Target],
    unexpected: Sequence[StoredTensor],
) -> None:
    missing = [name for name in targets if name not in wanted]
    repeated = [
        f"{name} in {' and '.join(f'{t.file.name} as {t.name}' for t in tensors)}"
        for name, tensors in wanted.items()
        if len(tensors) > 1
    ]
    misshapen = [
        f"{tensor}, want {list(_stored_shape(targets[name]))}"
        for name, tensors in wanted.items()
        for tensor in tensors
        if tensor.shape != _stored_shape(targets[name])
    ]
    problems = [
        f"{len(names)} {kind}: {_listed(names)}"
        for kind, names in (
            ("missing", missing),
            ("unexpected", [str(tensor) for tensor in unexpected]),
            ("misshapen", misshapen),
            ("stored twice", repeated),
        )
        if names
    ]
    if problems:
        remedy = "check that config.json belongs to these weights and that all shards are there"
        if missing and all(name.startswith("mtp.") for name in missing):
            remedy = (
                "this checkpoint has no MTP layer, which saving with transformers drops: serve it "
                "without MTP drafts, or copy the mtp.* tensors from the original checkpoint"
            )
        raise WeightMismatch(f"weights do not fit the model; {'; '.join(problems)}; {remedy}")


def _check_copies(
    rule: IgnoreRule, skipped: Mapping[str, StoredTensor], targets: Mapping[str, Target]
) -> None:
    """Check that skipped tensors equal the target that stands for them."""
    if rule.copy_of is None:
        return
    original = targets[rule.copy_of]
    assert isinstance(original, Tensor), f"{rule.copy_of} is whole on every rank"
    for tensor in skipped.values():
        with _opened(tensor.file) as handle:
            same = tensor.shape == tuple(original.shape) and torch.equal(
                handle.get_tensor(tensor.name).to(original), original
            )
        if not same:
            raise WeightMismatch(
                f"{tensor} differs from {rule.copy_of}, which the config says it shares "
                "(tie_word_embeddings); set tie_word_embeddings to false in config.json"
            )


def _copy_file(file: Path, targets: Mapping[str, Target]) -> None:
    """Copy one file's tensors, given by stored name."""
    if not targets:
        return
    with _opened(file) as handle, torch.no_grad():
        for name in handle.keys():  # noqa: SIM118
            if name in targets:
                _copy(handle, name, targets[name])


def _copy(handle: _OpenFile, name: str, target: Target) -> None:
    """Copy a stored tensor, or what a rank keeps of it."""
    # what is read is not bound to a name: it is gone before the next is read
    if isinstance(target, Shard):
        for piece, index in target.pieces():
            piece.copy_(handle.get_slice(name)[index])
    else:
        target.copy_(handle.get_tensor(name))


def _held(target: Target) -> Tensor:
    return target.tensor if isinstance(target, Shard) else target


def _stored_shape(target: Target) -> tuple[int, ...]:
    return target.stored_shape if isinstance(target, Shard) else tuple(target.shape)


@contextmanager
def _opened(file: Path) -> Iterator[_OpenFile]:
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:
            yield cast("_OpenFile", handle)
    except SafetensorError as error:
        raise ModelError(
            f"{file} is no complete safetensors file ({error}){_lfs_hint(file)}; download it again"
        ) from error
    except OSError as error:
        raise ModelError(
            f"{file} cannot be read ({error}); check that it exists and its permissions"
        ) from error


def _lfs_hint(file: Path) -> str:
    with file.open("rb") as content:
        is_pointer = content.read(16) == b"version https://"
    return ": it is a Git LFS pointer, `git lfs pull` fetches the weights" if is_pointer else ""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")


def _shared_name(names: Sequence[str]) -> str:
    """Return what dotted names share: `model.visual.*` for two or more tensors below it."""
    if len(names) == 1:
        return names[0]
    shared: list[str] = []
    for parts in zip(*(name.split(".") for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join([*shared, "*"])
