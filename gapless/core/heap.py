"""What Python's collector of cycles goes through while requests are served."""

from __future__ import annotations

import gc
import logging

logger = logging.getLogger(__name__)


def freeze_heap() -> None:
    """Take all objects that there are out of the collector's sight; for processes that serve.

    Modules, the model and its graphs are here to stay. A full collection would go through hundreds
    of thousands of them again and again, in a tenth of a second between two steps.
    """
    gc.collect()
    gc.freeze()
    logger.info("%d objects are here to stay, and not collected", gc.get_freeze_count())
