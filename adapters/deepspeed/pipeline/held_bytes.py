# SPDX-License-Identifier: Apache-2.0
"""What layers leave behind for their backward, in bytes, as they train: the first forward of each in a batch is asked.

Autograd says what it saves. A tensor counts once for each layer that saves it, with the whole of its storage; one that
two layers share counts for both, so that their sum is what they take wherever the cut between them lies, or more.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class HeldBytes:
    """Of one batch. note: where the bytes of a layer go, at the place that is named. parameters: not counted."""

    def __init__(self, note: array[float], parameters: Iterable[torch.Tensor]) -> None:
        self._note = note
        self._known = {parameter.data_ptr() for parameter in parameters}
        self._sizes: dict[int, int] = {}
        self._asked: set[int] = set()
        self._open: tuple[int, Any] | None = None

    def begin(self, place: int) -> None:
        """Before a forward of the layer."""
        if place not in self._asked and self._open is None:
            self._asked.add(place)
            hooks = saved_tensors_hooks(self._pack, _itself)
            hooks.__enter__()
            self._open, self._sizes = (place, hooks), {}

    def end(self, place: int) -> None:
        """Behind it."""
        if self._open is not None and self._open[0] == place:
            self._note[place] = max(1.0, float(sum(self._sizes.values())))
            self.close()

    def close(self) -> None:
        """May be called again; a forward that raised has no end."""
        if self._open is not None:
            self._open[1].__exit__()
            self._open = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.data_ptr()
        if where not in self._known and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # an output that is kept as itself would keep its graph alive


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
