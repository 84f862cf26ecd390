# SPDX-License-Identifier: Apache-2.0
"""Defines DLPack's numbers of dtypes, and makes tensors on any device over memory of the library."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

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


_tools: Any = None


def _load_tools() -> Any:
    """Returns malloc, the address of free (deletes a block, as a tensor may outlive Python objects), PyCapsule_New."""
    global _tools
    if _tools is None:
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        capsule = ctypes.pythonapi.PyCapsule_New
        capsule.restype = ctypes.py_object
        capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        _tools = libc.malloc, ctypes.cast(libc.free, ctypes.c_void_p).value, capsule
    return _tools


def borrow(address: int, rows: int, width: int, dtype: torch.dtype, device_type: int, device_id: int) -> torch.Tensor:
    """Returns a tensor over memory that torch does not own, row-major [rows, width], without a copy or a wait."""
    malloc, free, capsule = _load_tools()
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
