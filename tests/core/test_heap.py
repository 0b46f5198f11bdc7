"""What was there when serving began is not gone through by the collector of cycles."""

from __future__ import annotations

import gc

from gapless.core.heap import freeze_heap


def test_what_is_there_is_out_of_the_collectors_sight() -> None:
    kept = [[] for _ in range(10_000)]
    try:
        freeze_heap()
        assert gc.get_freeze_count() > len(kept)
        assert len(gc.get_objects()) < len(kept)
    finally:
        gc.unfreeze()
