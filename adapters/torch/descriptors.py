# SPDX-License-Identifier: Apache-2.0
"""Describes torch tensors to the library by addresses and strides, without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..._library import load
from ...errors import InvalidArgument
from .placement import FORMS, Placement, placement_of


def config_dtype(dtype: torch.dtype) -> int:
    """Returns SLUICE_DTYPE_* of a dtype."""
    form = FORMS.get(dtype)
    if form is None or not form[2]:
        raise InvalidArgument(f"{dtype} is not a dtype that Sluice computes with: use float32, bfloat16 or float16")
    return form[2]


class Descriptors:
    """Has `count` descriptors of at most two dimensions, with their shapes and strides. Reused from call to call.

    A layer with many experts fills hundreds of them in each pass, so unchanged fields are not written again.
    """

    def __init__(self, count: int, placement: Placement | None = None) -> None:
        self._placement = placement or placement_of(None)
        self._holds = self._placement.holds
        self._ffi = load().ffi
        self._items = self._ffi.new("sluice_tensor_t[]", max(count, 1))
        self._extents = self._ffi.new("int64_t[]", 4 * max(count, 1))
        # `data` is the first member. It is written as a word, so that no pointer object is made.
        self._words = self._ffi.cast("uint64_t *", self._items)
        self._pitch = self._ffi.sizeof("sluice_tensor_t") // 8
        self._forms: list[Any] = [None] * count
        self.count = count
        for index in range(count):
            item = self._items[index]
            item.device_type = self._placement.code
            item.device_id = self._placement.index
            item.type_lanes = 1
            self._point(index, index)

    def _point(self, index: int, to: int) -> None:
        """Makes a descriptor use the shape and strides of descriptor `to`."""
        self._items[index].shape = self._extents + 4 * to
        self._items[index].strides = self._extents + 4 * to + 2

    def pointer(self, index: int = 0) -> Any:
        return self._items + index

    def fill(self, index: int, tensor: torch.Tensor, name: str) -> Any:
        """Describes `tensor` at `index` and returns the pointer."""
        self.fill_all([tensor], [index], [name])
        return self._items + index

    def fill_all(self, tensors: Sequence[torch.Tensor], places: Sequence[int], names: Sequence[str]) -> None:
        """Describes each tensor at its place. Addresses are read in every call, because hosts move parameters."""
        words, pitch, forms, holds = self._words, self._pitch, self._forms, self._holds
        for tensor, index, name in zip(tensors, places, names):
            form = (tensor.dtype, tensor.shape, tensor.stride())
            if form != forms[index] or not holds(tensor):
                self._describe(index, tensor, name)
                forms[index] = form
            words[index * pitch] = tensor.data_ptr()

    def set_rows(self, rows: int, count: int) -> None:
        """Sets the number of rows of the first `count` descriptors, which describe row-major matrices."""
        for index in range(count):
            self._extents[4 * index] = rows
            self._extents[4 * index + 2] = self._extents[4 * index + 1]
            self._forms[index] = None

    def set_addresses(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sets the addresses of the first descriptors, whose other fields have not changed."""
        words, place = self._words, 0
        for tensor in tensors:
            words[place] = tensor.data_ptr()
            place += self._pitch

    def fill_stack(self, first: int, stack: torch.Tensor, name: str) -> None:
        """Describes stack[0], stack[1], ... at `first` onwards. All point to the first's shape: quick to check."""
        words, pitch, forms, count = self._words, self._pitch, self._forms, stack.shape[0]
        form = (first, stack.dtype, stack.shape[1:], stack.stride()[1:])
        if not self._holds(stack) or any(form != forms[index] for index in range(first, first + count)):
            for index in range(count):
                self._describe(first + index, stack[index], f"{name} of local expert {index}")
                self._point(first + index, first)
                forms[first + index] = form
        address, step = stack.data_ptr(), stack.stride(0) * stack.element_size()
        for place in range(first * pitch, (first + count) * pitch, pitch):
            words[place] = address
            address += step

    def _describe(self, index: int, tensor: torch.Tensor, name: str) -> None:
        if not self._holds(tensor):
            wanted = str(self._placement.device)
            raise InvalidArgument(
                f"{name} is on {tensor.device} and this layer's context on {wanted}: move it with .to({wanted!r}), or "
                "make the context for its device"
            )
        if tensor.layout is not torch.strided:
            raise InvalidArgument(f"{name} is a {tensor.layout} tensor: Sluice reads strided ones")
        if tensor.dtype not in FORMS:
            raise InvalidArgument(f"{name} is {tensor.dtype}, which Sluice does not read")
        if tensor.dim() > 2:
            raise InvalidArgument(f"{name} has shape {list(tensor.shape)}: at most two dimensions are described")
        self._point(index, index)
        item = self._items[index]
        item.type_code, item.type_bits = FORMS[tensor.dtype][:2]
        item.ndim = tensor.dim()
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            self._extents[4 * index + axis] = size
            # torch does not define the stride of a single row or column; the library requires one stride of 1.
            self._extents[4 * index + 2 + axis] = stride if size > 1 else 1
