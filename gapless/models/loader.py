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

from gapless.config.hf.quantization import FP8_BLOCK
from gapless.errors import ModelError, UnsupportedModel, WeightMismatch
from gapless.layers.shard import Shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from gapless.layers.shard import Target

LOADABLE_DTYPES = ("F64", "F32", "BF16", "F16")
# scaled by blocks of FP8_BLOCK rows and columns; DeepSeek-AI 2024, "DeepSeek-V3", section 3.3.2
FP8_DTYPE = "F8_E4M3"
SCALE_SUFFIX = "_scale_inv"

# stored prefix -> canonical prefix: multimodal checkpoints wrap the text model in two ways, and
# Nemotron-H's call it the backbone
TEXT_PREFIXES = (
    ("backbone.", "model."),
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


@dataclass(frozen=True)
class _Stored:
    """Stored tensors by canonical name."""

    wanted: dict[str, list[StoredTensor]]
    scales: dict[str, list[StoredTensor]]
    """By the name of the weight that they belong to."""
    ignored: dict[IgnoreRule, dict[str, StoredTensor]]
    unexpected: list[StoredTensor]


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
    file, and at the scales of weights that are stored in FP8: `NAME_scale_inv` of weight NAME holds
    a factor for each block of 128 x 128 entries.

    Args:
        files: safetensors files that together hold the weights.
        targets: canonical name -> destination, written in place: a tensor or view of exactly the
            stored shape, or a shard of it, on its own device and in its own dtype.
        canonical: stored name -> canonical name.
        ignore: rules for tensors that are no targets; one log line for each that applied.

    Raises:
        ModelError: a file is truncated or no safetensors file.
        UnsupportedModel: a target is stored in a dtype that is neither a plain float nor FP8 with
            scales.
        WeightMismatch: a tensor is missing, unexpected, misshapen, stored twice, or differs from
            the target that its rule calls it a copy of. Except in that last case nothing has been
            written.
    """
    found = _sorted_out(stored_tensors(files), targets, canonical, ignore)
    _check_dtypes(found)
    _check_fit(found, targets)
    scales = {name: _read(scale) for name, (scale,) in found.scales.items()}
    if scales:
        logger.info(
            "%d tensors are stored in FP8 with a scale per block of %d x %d; they are dequantised "
            "and take the space of the engine's dtype",
            len(scales), FP8_BLOCK, FP8_BLOCK,
        )  # fmt: skip
    for file in files:
        own = {t.name: name for name, (t,) in found.wanted.items() if t.file == file}
        _copy_file(
            file, {stored: (targets[name], scales.get(name)) for stored, name in own.items()}
        )
    for rule, skipped in found.ignored.items():
        _check_copies(rule, skipped, targets)
        shared = _shared_name(list(skipped))
        logger.info("skipped %d tensors (%s): %s", len(skipped), shared, rule.reason)
    return LoadReport(
        num_files=len(files),
        num_tensors=len(targets),
        num_bytes=sum(_held(target).nbytes for target in targets.values()),
        ignored={rule: tuple(skipped) for rule, skipped in found.ignored.items()},
    )


def _sorted_out(
    tensors: Sequence[StoredTensor],
    targets: Mapping[str, Target],
    canonical: Callable[[str], str],
    ignore: Sequence[IgnoreRule],
) -> _Stored:
    """Say of every stored tensor what it is for; a target goes before a rule."""
    found = _Stored({}, {}, {}, [])
    for tensor in tensors:
        name = canonical(tensor.name)
        scaled = name.removesuffix(SCALE_SUFFIX)
        rule = next((rule for rule in ignore if fullmatch(rule.pattern, name)), None)
        if name in targets:
            found.wanted.setdefault(name, []).append(tensor)
        elif scaled != name and scaled in targets:
            found.scales.setdefault(scaled, []).append(tensor)
        elif rule is not None:
            found.ignored.setdefault(rule, {})[name] = tensor
        else:
            found.unexpected.append(tensor)
    return found


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


def _check_dtypes(found: _Stored) -> None:
    packed = [
        tensor
        for name, tensors in found.wanted.items()
        for tensor in tensors
        if tensor.dtype not in LOADABLE_DTYPES
        and not (tensor.dtype == FP8_DTYPE and name in found.scales)
    ]
    if packed:
        raise UnsupportedModel(
            f"{len(packed)} tensors are stored in a dtype that is not supported: "
            f"{_listed([str(tensor) for tensor in packed])}; want {', '.join(LOADABLE_DTYPES)}, or "
            f"{FP8_DTYPE} with scales by block: serve the unquantised checkpoint of this model"
        )


def _check_fit(found: _Stored, targets: Mapping[str, Target]) -> None:
    wanted = found.wanted
    missing = [name for name in targets if name not in wanted]
    repeated = [
        f"{name} in {' and '.join(f'{t.file.name} as {t.name}' for t in tensors)}"
        for kind in (wanted, found.scales)
        for name, tensors in kind.items()
        if len(tensors) > 1
    ]
    shapes = {name: _stored_shape(targets[name]) for name in wanted}
    blocks = {
        name: tuple(-(-size // FP8_BLOCK) for size in _stored_shape(targets[name]))
        for name in found.scales
    }
    misshapen = [
        f"{tensor}, want {list(shape[name])}"
        for kind, shape in ((wanted, shapes), (found.scales, blocks))
        for name, tensors in kind.items()
        for tensor in tensors
        if tensor.shape != shape[name]
    ]
    # a scale belongs to a weight that is stored in FP8, and to no other
    unexpected = found.unexpected + [
        tensor
        for name, tensors in found.scales.items()
        for tensor in tensors
        if any(weight.dtype != FP8_DTYPE for weight in wanted.get(name, ()))
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


def _copy_file(file: Path, targets: Mapping[str, tuple[Target, Tensor | None]]) -> None:
    """Copy one file's tensors, given by stored name, each with its scales if it has some."""
    if not targets:
        return
    with _opened(file) as handle, torch.no_grad():
        for name in handle.keys():  # noqa: SIM118
            if name in targets:
                target, scales = targets[name]
                _copy(handle, name, target, scales)


def _copy(handle: _OpenFile, name: str, target: Target, scales: Tensor | None) -> None:
    """Copy a stored tensor, or what a rank keeps of it."""
    # what is read is not bound to a name: it is gone before the next is read
    if isinstance(target, Shard):
        for piece, index in target.pieces():
            piece.copy_(_dequantised(handle.get_slice(name)[index], scales, index))
    else:
        whole = tuple(slice(0, size) for size in target.shape)
        target.copy_(_dequantised(handle.get_tensor(name), scales, whole))


def _dequantised(part: Tensor, scales: Tensor | None, index: tuple[slice, ...]) -> Tensor:
    """Multiply the part of a stored matrix at `index` by its blocks' scales, in float32."""
    if scales is None:
        return part
    for dim, kept in enumerate(index):
        block = torch.arange(kept.start, kept.stop) // FP8_BLOCK
        scales = scales.index_select(dim, block)
    return part.to(torch.float32) * scales


def _read(tensor: StoredTensor) -> Tensor:
    with _opened(tensor.file) as handle:
        return handle.get_tensor(tensor.name).to(torch.float32)


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
