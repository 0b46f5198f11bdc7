"""`option=value` texts to options of the declared types."""

from __future__ import annotations

from typing import Any

import pytest

from gapless.bench.settings import changed_options
from gapless.config.options import EngineOptions
from gapless.errors import ConfigError

BASE = EngineOptions(dtype="float64", page_size=4)


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        ("linear_replayssm_cache_len=1", "linear_replayssm_cache_len", 1),
        ("--linear-replayssm-cache-len = 1", "linear_replayssm_cache_len", 1),
        ("mem_fraction=0.25", "mem_fraction", 0.25),
        ("mem_fraction=1", "mem_fraction", 1.0),
        ("dtype=bfloat16", "dtype", "bfloat16"),
        ("model=a=b", "model", "a=b"),
        ("page_size=none", "page_size", None),
        ("model=None", "model", None),
    ],
)
def test_value_has_the_declared_type(change: str, name: str, value: Any) -> None:
    changed = changed_options(BASE, [change])
    assert vars(changed) == {**vars(BASE), name: value}
    assert type(vars(changed)[name]) is type(value)


def test_several_changes_are_made_together() -> None:
    changed = changed_options(BASE, ["page_size=8", "num_threads=2"])
    assert (changed.page_size, changed.num_threads, changed.dtype) == (8, 2, "float64")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["page_sise=8"], "unknown option 'page_sise'; did you mean 'page_size'"),
        (["page_size"], "'page_size': want option=value"),
        (["page_size=8", "page-size=16"], "page_size is changed twice"),
        (["page_size=many"], "page_size='many': want an integer"),
        (["page_size=1.5"], "page_size='1.5': want an integer"),
        (["mem_fraction=half"], "mem_fraction='half': want a number"),
        (["dtype=float8"], "dtype='float8': want one of auto, float32"),
        (["dtype=none"], "dtype='none': want one of"),
    ],
)
def test_bad_changes(changes: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed_options(BASE, changes)
