# SPDX-License-Identifier: Apache-2.0
"""Measures how fast an optimizer step is on this machine's tiers: host memory, and files of a folder."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass

from ._library import load

ELEMENTS = 8 << 20
BYTES_PER_ELEMENT = 28  # parameter and moments are read and written, the gradient is read
BLOCK, BLOCKS = 16 << 20, 8
ROUNDS = 3


@dataclass(frozen=True)
class Rates:
    """Has bytes per second, the best of a few rounds."""

    update: float
    write: float
    read: float


def measure(folder: str) -> Rates:
    """Writes 128 MiB into an unnamed file of the folder, and allocates as much memory. Raises OSError.

    Writes are flushed to the disk, and reads come from the disk, as far as the system supports both.
    """
    written, read = zip(*(_file(folder) for _ in range(ROUNDS)))
    return Rates(_update(), max(written), max(read))


def _update() -> float:
    library = load()
    ffi, lib = library.ffi, library.lib
    arrays = [ffi.new("float[]", ELEMENTS) for _ in range(4)]
    tensor = ffi.new("sluice_optimizer_tensor_t *")
    tensor.param, tensor.grad, tensor.exp_avg, tensor.exp_avg_sq = arrays
    tensor.count, tensor.step = ELEMENTS, 1
    tensor.param_dtype = tensor.grad_dtype = ffi.integer_const("SLUICE_DTYPE_F32")
    group, args = library.new("optimizer_group"), library.new("optimizer_step_args")
    group.tensors, group.num_tensors = tensor, 1
    groups = ffi.new("sluice_optimizer_group_t *[]", [group])
    args.groups, args.num_groups, args.check_finite = groups, 1, 0
    out = ffi.new("sluice_optimizer_t **")
    library.check(lib.sluice_optimizer_create(library.new("optimizer_config"), out))
    try:
        seconds = []
        for _ in range(ROUNDS + 1):  # the first round allocates the pages
            begin = time.perf_counter()
            library.check(lib.sluice_optimizer_step(out[0], args, ffi.NULL))
            seconds.append(time.perf_counter() - begin)
    finally:
        lib.sluice_optimizer_destroy(out[0])
    return BYTES_PER_ELEMENT * ELEMENTS / min(seconds[1:])


def _file(folder: str) -> tuple[float, float]:
    block = bytearray(os.urandom(1 << 16) * (BLOCK >> 16))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor = file.fileno()
        begin = time.perf_counter()
        for index in range(BLOCKS):
            _whole(os.pwrite(descriptor, block, index * BLOCK))
        os.fsync(descriptor)
        written = time.perf_counter() - begin
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        for index in range(BLOCKS):
            _whole(os.preadv(descriptor, [block], index * BLOCK))
        read = time.perf_counter() - begin
    return BLOCK * BLOCKS / written, BLOCK * BLOCKS / read


def _whole(count: int) -> None:
    if count != BLOCK:
        raise OSError(f"{count} bytes of {BLOCK} went through: the folder is full")
