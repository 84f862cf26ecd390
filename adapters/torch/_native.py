# SPDX-License-Identifier: Apache-2.0
"""Loads the adapter's shared object: callbacks over c10d, GEMMs by torch, signals during a wait, autograd's state.

The object does not link to Python, so ctypes opens it. Its addresses are passed to libsluice; the two are not linked.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import threading
from typing import Any

import torch

from ..._library import Library
from ...errors import External, from_status

_ADDRESS, _TEXT = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_int32)


def _function(handle: Any, name: str, result: Any, *arguments: Any) -> Any:
    found = getattr(handle, f"sluice_torch_{name}")
    found.restype, found.argtypes = result, arguments
    return found


class Native:
    """Loads the functions of the shared object at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        handle = ctypes.CDLL(path)
        self._open = _function(handle, "comm_open", ctypes.c_int32, ctypes.c_char_p, *[_ADDRESS] * 2, *_TEXT)
        self.gemm_address = ctypes.cast(handle.sluice_torch_gemm, ctypes.c_void_p).value
        # These make a few system calls at most, so that releasing the GIL is not worth it.
        quick = ctypes.PyDLL(path)
        self.interrupt_enter = _function(quick, "interrupt_enter", None)
        self.interrupt_leave = _function(quick, "interrupt_leave", None)
        numbers = [ctypes.c_int64] * 2
        self.may_accumulate = _function(
            quick, "may_accumulate", ctypes.c_int32, *numbers, _ADDRESS, ctypes.c_int64, _ADDRESS
        )
        # This releases the GIL, because the call may first free idle memory.
        self.take_gradient = _function(handle, "take_gradient", ctypes.c_int32, _ADDRESS, _ADDRESS, ctypes.c_uint64)
        self.give_back_gradients = _function(handle, "give_back_gradients", None)
        self._gradient_pool = _function(quick, "gradient_pool", None, _ADDRESS)

    def gradient_pool(self) -> tuple[int, ...]:
        """Returns the four numbers of sluice_torch_gradient_pool."""
        found = (ctypes.c_uint64 * 4)()
        self._gradient_pool(found)
        return tuple(found)

    def open_group(self, library: Library, group_name: str) -> tuple[Any, Any]:
        """Returns callbacks and their `user` for a registered process group; the caller passes both to libsluice."""
        ffi = library.ffi
        vtable = ffi.new("sluice_host_comm_vtable_t *")
        user = ffi.new("void **")
        message = ctypes.create_string_buffer(512)
        status = self._open(
            group_name.encode(),
            int(ffi.cast("uintptr_t", vtable)),
            int(ffi.cast("uintptr_t", user)),
            message,
            len(message),
        )
        if status != 0:
            text = message.value.decode(errors="replace")
            raise from_status(status, f"process group {group_name!r} cannot carry Sluice's messages: {text}")
        return vtable, user[0]


@functools.cache
def native() -> Native:
    """Opens the shared object of this torch, compiling it first if there is none."""
    from . import build  # imported late: `python -m sluice.adapters.torch.build` imports this package first

    path = build.ensure()
    try:
        return Native(path)
    except (OSError, AttributeError) as error:
        raise External(
            f"{path} does not load into torch {torch.__version__} ({error}): delete it and run "
            "`python -m sluice.adapters.torch.build`"
        ) from error


class interruptible:
    """Lets Ctrl-C end waits for other ranks, while it is entered on the main thread.

    Python's handler runs only after the call into the library has returned. This applies to Python's default handler
    only: a host with its own handler (such as "save a checkpoint after this step") does not expect an aborted step.
    """

    __slots__ = ("_entered",)

    def __init__(self) -> None:
        self._entered = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            native().interrupt_enter()
            self._entered = True

    def __exit__(self, *details: object) -> None:
        if self._entered:
            native().interrupt_leave()


# Number of forks. Objects made before a fork belong to the parent.
_generation = 0


def _after_fork() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_after_fork)


def generation() -> int:
    """Returns a number that differs between a process and its forked children."""
    return _generation
