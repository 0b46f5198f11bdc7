"""The number that a worked answer ends in."""

from __future__ import annotations

import re

# whole numbers only: "12.5" and "1,23" are not read as 12 and 1; bounded, since int() is
_NUMBER = re.compile(r"####[ \t]*([+-]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+))(?![0-9]|[.,][0-9])")
_MAX_DIGITS = 1000


def last_number(text: str) -> int | None:
    """Return N of the last `#### N`, None where there is none.

    N is a whole number with an optional sign and optional thousands separators.
    """
    found = _NUMBER.findall(text)
    if not found:
        return None
    sign, digits = found[-1]
    plain = digits.replace(",", "")
    return int(sign + plain) if len(plain) <= _MAX_DIGITS else None
