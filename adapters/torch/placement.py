# SPDX-License-Identifier: Apache-2.0
"""Places a context and its tensors on a device: this CPU, or one CUDA device with the host's current stream.

On CUDA the library joins its work to the host's current stream before a call returns. Tensors of this stream may
therefore be freed right after the call, as with torch's own operations, without `record_stream`. Pinned host memory is
different, because torch reuses a freed block at once: this module keeps it until the stream has used it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..._library import load
from ...errors import InvalidArgument, Unsupported

# DLPack's type code and width of each dtype of the library, and its number in configs; 0: not in configs.
FORMS = {
    torch.float32: (2, 32, 1),
    torch.bfloat16: (4, 16, 2),
    torch.float16: (2, 16, 3),
    torch.float64: (2, 64, 4),
    torch.int32: (0, 32, 5),
    torch.int64: (0, 64, 6),
    torch.uint8: (1, 8, 0),
}

CPU, CUDA = 1, 2  # kDLCPU, kDLCUDA


class _Block(ctypes.Structure):
    """Has a DLManagedTensor, followed by the shape that it points to."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),  # NULL: row-major
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("extents", ctypes.c_int64 * 2),
    ]


@functools.cache
def _tools() -> Any:
    """Returns malloc, the address of free (deletes a block, as a tensor may outlive Python objects), PyCapsule_New."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype = ctypes.py_object
    capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return libc.malloc, ctypes.cast(libc.free, ctypes.c_void_p).value, capsule


def borrow(address: int, rows: int, width: int, dtype: torch.dtype, device_type: int, device_id: int) -> torch.Tensor:
    """Returns a tensor over memory that torch does not own, row-major [rows, width], without a copy or a wait."""
    malloc, free, capsule = _tools()
    place = malloc(ctypes.sizeof(_Block))
    if not place:
        raise MemoryError("no memory for the description of a tensor")
    block = _Block.from_address(place)
    block.data = address
    block.device_type, block.device_id = device_type, device_id
    block.ndim, block.type_lanes = 2, 1
    block.type_code, block.type_bits = FORMS[dtype][:2]
    block.shape, block.strides, block.byte_offset = place + _Block.extents.offset, None, 0
    block.manager, block.deleter = None, free
    block.extents[0], block.extents[1] = rows, width
    return torch.from_dlpack(capsule(place, b"dltensor", None))


_ROWS = (1, 2)  # SLUICE_SAVED_INPUT, _PRE_ACTIVATION: device memory
_OFFLOADED = (3, 4)  # SLUICE_SAVED_HOST_INPUT, _HOST_PRE_ACTIVATION: pinned memory on CUDA


class Placement:
    """Places a context on the CPU: host memory, no stream."""

    is_cuda = False
    code = CPU
    index = 0
    device = torch.device("cpu")

    def name(self) -> str:
        """Returns the driver's name of the GPU; empty for a CPU."""
        return ""

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cpu

    def stream(self) -> Any:
        """Returns the stream argument of the library's calls."""
        return load().ffi.NULL

    def saved_bytes(self, which: int, size: int) -> torch.Tensor | None:
        """Returns memory for a saved buffer; None: the context's own."""
        return None

    def bring(self, which: int, buffer: torch.Tensor) -> torch.Tensor:
        """Returns the buffer, copied if the library cannot read it: saved-tensor hooks may restore it anywhere."""
        if buffer.numel() == 0 or (buffer.is_cpu and buffer.data_ptr() % 64 == 0 and buffer.is_contiguous()):
            return buffer
        return torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu").copy_(buffer)

    def keep(self, buffers: Sequence[torch.Tensor]) -> None:
        """Keeps host memory until the enqueued work of the stream has run."""

    def borrow(self, address: Any, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the library's rows as a tensor; it is valid during the callback only."""
        count = rows * width
        raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(int(load().ffi.cast("uintptr_t", address)))
        return torch.frombuffer(raw, dtype=dtype, count=count).view(rows, width)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Guards the host's own code in a callback, so that its new tensors are on this device."""
        return contextlib.nullcontext()


class CudaPlacement(Placement):
    """Places a context on one CUDA device; calls use torch's current stream on it."""

    is_cuda = True
    code = CUDA

    def __init__(self, device: torch.device) -> None:
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", self.index)
        self._kept: deque[tuple[Any, list[torch.Tensor]]] = deque()

    def name(self) -> str:
        return str(torch.cuda.get_device_name(self.device))

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self.device

    def stream(self) -> Any:
        return load().ffi.cast("void *", torch.cuda.current_stream(self.device).cuda_stream)

    def saved_bytes(self, which: int, size: int) -> torch.Tensor | None:
        if which in _ROWS:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=which in _OFFLOADED and size > 0)

    def bring(self, which: int, buffer: torch.Tensor) -> torch.Tensor:
        if which not in _ROWS:
            return super().bring(which, buffer)
        if buffer.numel() == 0 or (self.holds(buffer) and buffer.data_ptr() % 64 == 0 and buffer.is_contiguous()):
            return buffer
        return torch.empty(buffer.shape, dtype=buffer.dtype, device=self.device).copy_(buffer)

    def keep(self, buffers: Sequence[torch.Tensor]) -> None:
        offloaded = [buffers[which] for which in _OFFLOADED if which < len(buffers) and buffers[which].numel() > 0]
        if torch.cuda.is_current_stream_capturing():
            if offloaded:
                raise Unsupported("offloaded rows cannot be captured into a CUDA graph: choose another policy")
            return
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()
        if not offloaded:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._kept.append((event, offloaded))

    def borrow(self, address: Any, rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
        place = int(load().ffi.cast("uintptr_t", address))
        return borrow(place, rows, width, dtype, self.code, self.index)

    def guard(self) -> contextlib.AbstractContextManager[Any]:
        """Sets the device. The stream needs no guard: a callback runs on the calling thread, whose current stream is
        the call's, so that its work is in the library's order."""
        return torch.cuda.device(self.device)


_CPU = Placement()


def placement_of(device: torch.device | str | None) -> Placement:
    """Returns the placement of a device; None: the CPU."""
    device = torch.device("cpu" if device is None else device)
    if device.type == "cpu":
        return _CPU
    if device.type != "cuda":
        raise Unsupported(f"device is {device}: Sluice computes on the CPU and on CUDA devices")
    if torch.version.cuda is None or not torch.cuda.is_available():
        raise Unsupported(f"device is {device}, and this torch {torch.__version__} has no CUDA device to use")
    return CudaPlacement(device)


def device_of(tensors: Iterable[tuple[str, torch.Tensor]], default: str = "cpu") -> torch.device:
    """Returns the common device of these named tensors, or raises an error that names two that differ."""
    first: tuple[str, torch.device] | None = None
    for name, tensor in tensors:
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise InvalidArgument(
                f"{name} is on {tensor.device} and {first[0]} on {first[1]}: one layer computes on one device; move "
                f"one with .to({str(first[1])!r})"
            )
    if first is None:
        return torch.device(default)
    if first[1].type == "meta":
        raise InvalidArgument(f"{first[0]} is on the meta device: it has no values yet; load the weights first")
    return first[1]
