# SPDX-License-Identifier: Apache-2.0
"""Wraps `sluice/swap.h` for tensors: pieces of memory are copied to host memory or to a file, and back."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from ..._library import load
from .options import values_of

FORWARD_ENDS, BACKWARD_BEGINS, BACKWARD_NEXT, BACKWARD_ENDS = range(4)
PUT, SETTLE, PREFETCH, TAKE, RELEASE = range(5)
HOST = "host"  # the tier that is not a folder
NO_LIMIT = 1 << 62


class Op(NamedTuple):
    """Defines an op on all tensors that a layer has saved in one forward."""

    kind: int
    micro_batch: int
    layer: int


class Swap:
    """Swaps layers to a tier, at most `budget` bytes at one time, until `close` or until it is garbage.

    tier  "host", or a folder for a file, which has no name there once it is open
    """

    def __init__(
        self, swapped: Sequence[bool], tier: str = HOST, budget: int = NO_LIMIT, bytes_per_second: float = 0.0
    ) -> None:
        self._library = library = load()
        ffi = library.ffi
        config = library.new("swap_config")
        flags = ffi.new("int32_t[]", [int(each) for each in swapped])
        config.swapped, config.num_layers = flags, len(swapped)
        config.budget_bytes, config.bytes_per_second = budget, bytes_per_second
        if tier != HOST:
            # The name has to be new: the library makes the file, and refuses an existing one.
            name = f"sluice-swap-{os.getpid()}-{secrets.token_hex(8)}"
            path = ffi.new("char[]", os.fsencode(os.path.join(tier, name)))
            config.path = path
        out = ffi.new("sluice_swap_t **")
        library.check(library.lib.sluice_swap_create(config, out))
        self._room = max(len(swapped) + 1, 4)
        self._ops, self._count = ffi.new("sluice_swap_op_t[]", self._room), ffi.new("int32_t *")
        self._ticket = ffi.new("int64_t *")
        self._handle = ffi.gc(out[0], library.lib.sluice_swap_destroy)

    def reach(self, event: int, micro_batch: int, layer: int = 0) -> list[Op]:
        """Returns the ops that follow an event, to be run in their order."""
        ops, count = self._ops, self._count
        self._check(
            self._library.lib.sluice_swap_reach(self._handle, event, micro_batch, layer, ops, self._room, count)
        )
        return [Op(ops[i].kind, ops[i].micro_batch, ops[i].layer) for i in range(count[0])]

    def put(self, address: int, size: int) -> int:
        """Begins to copy bytes out; returns a ticket. The bytes must not change until `settle` or `release`."""
        data = self._library.ffi.cast("void *", address)
        self._check(self._library.lib.sluice_swap_put(self._handle, data, size, self._ticket))
        return int(self._ticket[0])

    def settle(self, ticket: int) -> None:
        """Waits until the bytes have been copied out."""
        self._check(self._library.lib.sluice_swap_settle(self._handle, ticket))

    def prefetch(self, ticket: int, address: int) -> None:
        """Begins to copy back to memory that must exist until `take` or `release`."""
        to = self._library.ffi.cast("void *", address)
        self._check(self._library.lib.sluice_swap_prefetch(self._handle, ticket, to))

    def take(self, ticket: int) -> None:
        """Waits until the bytes are back. The ticket is invalid after that."""
        self._check(self._library.lib.sluice_swap_take(self._handle, ticket))

    def release(self, ticket: int) -> None:
        """Drops the piece, if there is one."""
        self._library.lib.sluice_swap_release(self._handle, ticket)

    def reset(self) -> None:
        """Drops every piece, and forgets that a copy has failed."""
        self._library.lib.sluice_swap_reset(self._handle)

    def stats(self) -> dict[str, int]:
        """Returns the bytes and times since the swap was made, by the names of sluice_swap_stats_t."""
        out = self._library.ffi.new("sluice_swap_stats_t *")
        out.struct_size = self._library.ffi.sizeof(out[0])
        self._check(self._library.lib.sluice_swap_get_stats(self._handle, out))
        return values_of(out)

    def close(self) -> None:
        """Ends the copies."""
        self._library.ffi.release(self._handle)

    def _check(self, status: int) -> None:
        self._library.check(status)
