# SPDX-License-Identifier: Apache-2.0
"""Converts torch tensors to and from the messages of a pipeline: any number of tensors of any dtype and shape."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from ..._library import load
from ...errors import InvalidArgument
from ._native import generation
from .placement import FORMS

# DLPack's type code and width. Tensors are only moved, so that there are more dtypes than a layer computes with.
_FORMS = {dtype: form[:2] for dtype, form in FORMS.items()} | {
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.bool: (6, 8),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e5m2: (12, 8),
}
_DTYPES = {form: dtype for dtype, form in _FORMS.items()}


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's values, row-major in host memory and without a graph; a copy only if necessary."""
    if tensor.layout is not torch.strided or tensor.dtype not in _FORMS:
        raise InvalidArgument(
            f"a {tensor.layout} tensor of {tensor.dtype} cannot be sent from stage to stage: use dense tensors of "
            "torch's own dtypes"
        )
    if not tensor.is_cpu:
        raise InvalidArgument(
            f"a tensor on {tensor.device} cannot be sent from stage to stage: pipelines send host memory only"
        )
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class SentTensors:
    """Has the tensors that one op sends. The library reads them until `release`; the caller keeps this until then."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        ffi = load().ffi
        self._given = [tensor.detach() for tensor in tensors]
        self._plain = [_plain(tensor) for tensor in tensors]
        self._items = ffi.new("sluice_tensor_t[]", max(len(tensors), 1))
        self._extents = ffi.new("int64_t[]", max(sum(tensor.dim() for tensor in tensors), 1))
        first = 0
        for item, tensor in zip(self._items, self._plain):
            item.data = ffi.cast("void *", tensor.data_ptr() if tensor.numel() else 0)
            item.device_type, item.ndim, item.type_lanes = 1, tensor.dim(), 1
            item.type_code, item.type_bits = _FORMS[tensor.dtype]
            item.shape = self._extents + first
            for size in tensor.shape:
                self._extents[first] = size
                first += 1

    def as_given(self) -> list[torch.Tensor]:
        """Returns the tensors themselves, without a graph: for a reader on the same rank."""
        return [tensor.detach() for tensor in self._given]

    def describe_in(self, out: Any, word: int) -> None:
        """Writes the tensors and the word into a `sluice_stage_tensors_t`."""
        out.tensors, out.num_tensors, out.word = self._items, len(self._plain), word


class _Kept:
    """Owns the memory of a received message, which returns to the library when the last tensor in it is freed."""

    def __init__(self, pointer: Any) -> None:
        self._pointer, self._made_in = pointer, generation()
        self._give_back = load().lib.sluice_pipeline_give_back

    def __del__(self) -> None:
        if self._made_in == generation():  # in a forked child the memory is the parent's
            self._give_back(self._pointer)


def received(pipeline: Any, arrived: Any) -> list[torch.Tensor]:
    """Returns the tensors of a `sluice_stage_tensors_t` where they arrived, without a copy; torch may keep them.

    Called only inside of a callback. pipeline: its handle.
    """
    library = load()
    out = library.ffi.new("void **")
    library.check(library.lib.sluice_pipeline_keep(pipeline, arrived, out))
    owner = _Kept(out[0])
    return [_tensor_of(library.ffi, arrived.tensors[index], owner) for index in range(arrived.num_tensors)]


def _tensor_of(ffi: Any, item: Any, owner: _Kept) -> torch.Tensor:
    dtype = _DTYPES[item.type_code, item.type_bits]
    shape = [item.shape[axis] for axis in range(item.ndim)]
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    if size == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    raw = (ctypes.c_uint8 * size).from_address(int(ffi.cast("uintptr_t", item.data)) + item.byte_offset)
    raw._sluice_owner = owner  # the tensor keeps `raw`, and `raw` the memory
    # detach() makes it no view to torch, which forbids to detach a view in place.
    return torch.frombuffer(raw, dtype=dtype).view(shape).detach()
