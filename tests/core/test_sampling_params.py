"""Sampling parameters refuse what makes no sense, naming value, range and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from gapless import InvalidRequest, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, INF, "hot", True, None]),
        ("top_p", [0.0, -1.0, 1.1, NAN, INF, None]),
        ("min_p", [-0.1, 1.1, NAN]),
        ("top_k", [-2, 1.5, True, 2**31]),
        ("max_tokens", [0, -1, 1.5, "many"]),
        ("min_tokens", [-1, 0.5]),
        ("n", [0, -1, 1.0]),
        ("seed", [2**63, -(2**63) - 1, 0.5]),
        ("stop", [("",), (3,), "",]),
        ("stop_token_ids", [(-1,), (1.5,), (True,), tuple(range(9))]),
    ],
)  # fmt: skip
def test_refused(field: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidRequest, match=field):
            SamplingParams(**{field: value})


def test_contradiction_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens=5 is more than max_tokens=4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_accepted() -> None:
    SamplingParams(
        temperature=0, top_p=1, min_p=0, top_k=-1, max_tokens=None, seed=-(2**63), stop="end",
        stop_token_ids=[1, 2],  # type: ignore[arg-type]
    )  # fmt: skip
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[7]).stop_token_ids == (7,)  # type: ignore[arg-type]
    assert SamplingParams(temperature=0.0).is_greedy
    assert not SamplingParams().is_greedy
