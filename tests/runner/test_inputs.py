"""Packed uploads and late downloads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.runner.inputs import Download, Upload
from gapless.runner.syncs import forbid_syncs

CPU = torch.device("cpu")


def _arrays(count: int, fill: int) -> dict[str, np.ndarray]:
    return {
        "ids": np.full(count, fill, np.int64),
        "flags": np.array([True, False, True]),
        "scale": np.full((count, 2), fill / 2, np.float32),
        "none": np.zeros(0, np.int64),
    }


def _sent(upload: Upload, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    upload.send(arrays)
    return upload.views(arrays)


def test_arrays_arrive_with_shape_type_and_value() -> None:
    arrays = _arrays(5, 7)
    views = _sent(Upload(256, CPU), arrays)
    assert list(views) == list(arrays)
    for name, array in arrays.items():
        assert views[name].shape == array.shape
        np.testing.assert_array_equal(views[name].numpy(), array)


def test_equal_shapes_land_at_equal_addresses() -> None:
    upload = Upload(256, CPU)
    first = _sent(upload, _arrays(5, 1))
    second = _sent(upload, _arrays(5, 2))
    assert {n: v.data_ptr() for n, v in first.items()} == {
        n: v.data_ptr() for n, v in second.items()
    }
    assert first["ids"].tolist() == [2] * 5


def test_what_does_not_fit_is_an_error() -> None:
    with pytest.raises(AssertionError, match="scale ends at byte"):
        Upload(64, CPU).send(_arrays(5, 1))


def test_room_is_made_where_it_is_asked_for_and_kept() -> None:
    upload = Upload(64, CPU)
    arrays = _arrays(50, 3)
    with forbid_syncs():
        upload.reserve(arrays)
        first = _sent(upload, arrays)["ids"].data_ptr()
        upload.reserve(_arrays(5, 3))
        again = _sent(upload, arrays)
    assert again["ids"].data_ptr() == first
    np.testing.assert_array_equal(again["scale"].numpy(), arrays["scale"])


def test_a_ticket_keeps_its_step_while_the_next_one_is_fetched() -> None:
    source = torch.zeros(4, dtype=torch.int64)
    download = Download(source)
    source.fill_(1)
    first = download.fetch(4)
    source.fill_(2)
    second = download.fetch(2)
    assert first.read().tolist() == [1, 1, 1, 1]
    assert second.read().tolist() == [2, 2]


class Operations(TorchDispatchMode):
    """Names the operations that torch is asked for, views among them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_size_that_comes_again_takes_one_operation() -> None:
    upload, download = Upload(256, CPU), Download(torch.zeros(4))
    with Operations() as operations:
        for _ in range(4):
            upload.send(_arrays(5, 7))
            download.fetch(3)
    assert operations.names[-4:] == ["copy_"] * 4
