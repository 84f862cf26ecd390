"""torch tensors as the library's tensor descriptors: addresses and strides, nothing copied."""

from __future__ import annotations

from typing import Any

import torch

from ..._library import load
from ...errors import InvalidArgument

# DLPack's type code and width of each dtype that the library knows, and its number in configs.
_FORMS = {
    torch.float32: (2, 32, 1),
    torch.bfloat16: (4, 16, 2),
    torch.float16: (2, 16, 3),
    torch.float64: (2, 64, 4),
    torch.int32: (0, 32, 5),
    torch.int64: (0, 64, 6),
}
_CPU = 1


def config_dtype(dtype: torch.dtype) -> int:
    """SLUICE_DTYPE_* of a dtype."""
    form = _FORMS.get(dtype)
    if form is None:
        raise InvalidArgument(f"{dtype} is not a dtype that Sluice computes with: use float32, bfloat16 or float16")
    return form[2]


class Descriptors:
    """`count` descriptors of at most two dimensions, with their shapes and strides. Reused from call to call."""

    def __init__(self, count: int) -> None:
        self._ffi = load().ffi
        self._items = self._ffi.new("sluice_tensor_t[]", max(count, 1))
        self._extents = self._ffi.new("int64_t[]", 4 * max(count, 1))
        self._forms: list[Any] = [None] * count
        self.count = count
        for index in range(count):
            item = self._items[index]
            item.device_type = _CPU
            item.type_lanes = 1
            item.shape = self._extents + 4 * index
            item.strides = self._extents + 4 * index + 2

    def pointer(self, index: int = 0) -> Any:
        return self._items + index

    def fill(self, index: int, tensor: torch.Tensor, name: str) -> Any:
        """Describes `tensor` at `index` and returns the pointer. The address is read anew: hosts move parameters."""
        form = (tensor.dtype, tensor.shape, tensor.stride())
        item = self._items[index]
        if form != self._forms[index]:
            self._describe(index, item, tensor, name)
            self._forms[index] = form
        if tensor.device.type != "cpu":
            raise InvalidArgument(f"{name} is on {tensor.device}: this library computes on the CPU")
        item.data = self._ffi.cast("void *", tensor.data_ptr())
        return self._items + index

    def _describe(self, index: int, item: Any, tensor: torch.Tensor, name: str) -> None:
        if tensor.layout is not torch.strided:
            raise InvalidArgument(f"{name} is a {tensor.layout} tensor: Sluice reads strided ones")
        if tensor.dtype not in _FORMS:
            raise InvalidArgument(f"{name} is {tensor.dtype}, which Sluice does not read")
        if tensor.dim() > 2:
            raise InvalidArgument(f"{name} has shape {list(tensor.shape)}: at most two dimensions are described")
        self._forms[index] = None
        item.type_code, item.type_bits = _FORMS[tensor.dtype][:2]
        item.ndim = tensor.dim()
        for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride())):
            self._extents[4 * index + axis] = size
            # torch leaves the stride of a single row or column open; the library wants a unit stride somewhere.
            self._extents[4 * index + 2 + axis] = stride if size > 1 else 1
