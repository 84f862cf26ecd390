# SPDX-License-Identifier: Apache-2.0
"""Measures the bytes that each layer saves for its backward, in its first forward of a batch.

Saved-tensor hooks of autograd see the tensors. A tensor counts once for each layer that saves it, with its whole
storage. A tensor that two layers share counts for both, so the sum is an upper bound wherever the model is cut.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks


class HeldBytes:
    """Measures one batch. note: receives the bytes of a layer, at the layer's place. parameters: are not counted."""

    def __init__(self, note: array[float], parameters: Iterable[torch.Tensor]) -> None:
        self._note = note
        self._known = {parameter.data_ptr() for parameter in parameters}
        self._sizes: dict[int, int] = {}
        self._asked: set[int] = set()
        self._open: tuple[int, Any] | None = None

    def begin(self, place: int) -> None:
        """Called before a forward of the layer at this place."""
        if place not in self._asked and self._open is None:
            self._asked.add(place)
            hooks = saved_tensors_hooks(self._pack, _itself)
            hooks.__enter__()
            self._open, self._sizes = (place, hooks), {}

    def end(self, place: int) -> None:
        """Called after a forward of the layer at this place."""
        if self._open is not None and self._open[0] == place:
            self._note[place] = max(1.0, float(sum(self._sizes.values())))
            self.close()

    def close(self) -> None:
        """Ends a measurement, also after a forward that raised. May be called again."""
        if self._open is not None:
            self._open[1].__exit__()
            self._open = None

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.data_ptr()
        if where not in self._known and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # saving an output itself would keep its graph alive


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
