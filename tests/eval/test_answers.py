"""The number at the end of an answer."""

from __future__ import annotations

import pytest

from gapless.eval.answers import last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("2 * 3 = 6\n#### 6", 6),
        ("#### 6\nor rather\n#### 7", 7),
        ("####7", 7),
        ("####\t 7 dollars", 7),
        ("#### -12", -12),
        ("#### +12", 12),
        ("#### -0", 0),
        ("#### 007", 7),
        ("#### 1,234", 1234),
        ("#### -1,234,567", -1234567),
        ("#### 40.", 40),
        ("#### 40, and so", 40),
        ("##### 8", 8),
        ("#### 5\n#### none", 5),
    ],
)
def test_last_number(text: str, number: int) -> None:
    assert last_number(text) == number


@pytest.mark.parametrize(
    "text",
    [
        "",
        "the answer is 40",
        "### 40",
        "#### forty",
        "#### $40",
        "#### - 40",
        "####\n40",
        "#### 12.5",
        "#### 1,23",
        "#### 1,2345",
        "#### 12,34,567",
        "#### 1234,567",
        "#### ４０",
        "#### " + "9" * 5000,
    ],
)
def test_no_number(text: str) -> None:
    assert last_number(text) is None
