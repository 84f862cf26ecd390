# SPDX-License-Identifier: Apache-2.0
"""Allocates gradients in the memory of earlier, freed gradients (gradient_pool.cpp): one pool for each process."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import NamedTuple

import torch

from ._native import native

LEAST_BYTES = 1 << 20  # the C library reuses smaller blocks itself
_SHARE = 4  # this fraction of the process's memory may be idle: 1 / 4


class PoolStats(NamedTuple):
    """idle_bytes are kept for reuse, out_bytes are gradients now; num_fresh, num_reused count gradients made."""

    idle_bytes: int
    out_bytes: int
    num_fresh: int
    num_reused: int


def empty_gradient(like: torch.Tensor, limit: int) -> torch.Tensor:
    """Returns torch.empty_like(like), from the pool if it is large. At most `limit` bytes stay there; 0: from torch."""
    if limit > 0 and like.is_cpu and like.nbytes >= LEAST_BYTES:
        made = torch.empty(0, dtype=like.dtype, device="cpu")
        if native().take_gradient(made._cdata, like._cdata, limit):
            return made
    return torch.empty_like(like)


def pool_stats() -> PoolStats:
    """Returns the current state of this process's pool."""
    return PoolStats(*native().gradient_pool())


def numbers() -> dict[str, int]:
    """Returns the numbers for `sluice.stats`: bytes that are kept for reuse, and how many gradients reused memory."""
    now = pool_stats()
    return {"gradient_pool_bytes": now.idle_bytes, "gradients_reused": now.num_reused}


def give_back() -> int:
    """Frees idle memory; returns the number of bytes."""
    idle = pool_stats().idle_bytes
    native().give_back_gradients()
    return idle


@functools.cache
def default_limit() -> int:
    """Returns a quarter of the memory that this process may have."""
    return _memory() // _SHARE


def _memory() -> int:
    """Returns the bytes of the machine's memory, or of the control group's if that is less."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError), open(path) as file:
            found = min(found, int(file.read()))
    return found if found > 0 else sys.maxsize
