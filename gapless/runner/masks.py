"""Grammars' masks on their way to the device: filled on the host, one for every window position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gapless.ops.sampling import MaskRows
from gapless.runner.inputs import Upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gapless.core.request import Request
    from gapless.runner.device import Device


class WindowDrafts(NamedTuple):
    """What follows the newest token in a window, on the host."""

    tokens: Sequence[int]
    parents: Sequence[int]
    """Place in the window of the token before each; 0 is the newest one's."""


NO_DRAFTS = WindowDrafts((), ())


class MaskUpload:
    """Static buffers of masks, shared by prefill and decode steps, which follow each other."""

    def __init__(self, device: Device, max_rows: int, max_window: int) -> None:
        self._communicator = device.communicator
        self._num_words = -(-device.model.architecture.vocab_size // 32)
        self._max_positions = max_rows * max_window
        num_masks = 1 + self._max_positions
        self._upload = Upload(
            4 * (self._max_positions + num_masks * self._num_words) + 64, device.device
        )
        # a view of all of it: what is sent later lies at the same places, and may be less
        arrays = self._arrays(num_masks)
        self._upload.send(arrays)
        self._views = self._upload.views(arrays)
        self._is_clear = True

    def rows(self, num_rows: int, window: int) -> MaskRows:
        """View of the masks of `num_rows * window` positions, whatever is sent into it later."""
        return MaskRows(self._views["mask_of"][: num_rows * window], self._views["masks"])

    def clear(self) -> None:
        """Allow everything everywhere."""
        if not self._is_clear:
            self._upload.send(self._arrays(1))
            self._is_clear = True

    def send(
        self, requests: Sequence[Request], drafts: Sequence[WindowDrafts], window: int
    ) -> None:
        """Fill and send the masks of a step's rows, those without a grammar allowing everything.

        Args: drafts: proposals of each row's window.
        """
        constrained = [i for i, request in enumerate(requests) if request.is_constrained]
        arrays = self._arrays(1 + len(constrained) * window)
        for place, row in enumerate(constrained):
            first = 1 + place * window
            arrays["mask_of"][row * window :][:window] = np.arange(first, first + window)
            request = requests[row]
            # the other ranks of a model know no grammar: theirs comes with the sum
            if request.grammar is None:
                arrays["masks"][first:][:window] = 0
            else:
                masks = arrays["masks"][first:][:window]
                tokens, parents = drafts[row]
                request.grammar.fill(request.output_ids, tokens, masks, parents)
        self._upload.send(arrays)
        if constrained:
            own = self._upload.views(arrays)["masks"][1:]
            summed = self._communicator.all_reduce(own)
            if summed is not own:
                own.copy_(summed)
        self._is_clear = not constrained

    def _arrays(self, num_masks: int) -> dict[str, np.ndarray]:
        """Masks that allow everything; the first serves all positions without a grammar."""
        return {
            "mask_of": np.zeros(self._max_positions, np.int32),
            "masks": np.full((num_masks, self._num_words), -1, np.int32),
        }
