# SPDX-License-Identifier: Apache-2.0
"""Defines the Python exceptions for errors of the library.

Each status that a caller may want to handle separately has a class. This module needs neither the library nor a host.
"""

from __future__ import annotations


class SluiceError(RuntimeError):
    """A call into Sluice failed.

    status   the library's number; `status_name` is its name
    peer     the rank at fault, -1 if it is not known
    message  what, where, what to do
    """

    default_status = -15

    def __init__(self, message: str, *, status: int | None = None, peer: int = -1, native_code: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.default_status if status is None else status
        self.peer = peer
        self.native_code = native_code

    @property
    def status_name(self) -> str:
        return STATUS_NAMES.get(self.status, "UNKNOWN")

    def __str__(self) -> str:
        return f"{self.status_name}: {self.message}"

    def __reduce__(self) -> tuple:
        """Supports pickling, with which launchers pass a worker's exception to its parent."""
        return _rebuild, (type(self), self.message, self.status, self.peer, self.native_code)


def _rebuild(kind: type[SluiceError], message: str, status: int, peer: int, native_code: int) -> SluiceError:
    return kind(message, status=status, peer=peer, native_code=native_code)


class InvalidArgument(SluiceError, ValueError):
    default_status = -1


class AbiMismatch(SluiceError):
    """The library and the headers, or two of their structs, do not match."""

    default_status = -2


class NoMemory(SluiceError, MemoryError):
    default_status = -3


class Busy(SluiceError):
    default_status = -4


class Unsupported(SluiceError):
    default_status = -5


class NotFound(SluiceError):
    default_status = -6


class LibraryNotFound(NotFound, ImportError):
    """libsluice, or the module that describes it, is missing or does not load."""


class InvalidState(SluiceError):
    default_status = -7


class Mismatch(SluiceError):
    """The ranks do not agree; the message names them. The group stays usable."""

    default_status = -8


class PeerRefused(SluiceError):
    """Another rank refused its input. The group stays usable."""

    default_status = -9


class PeerLost(SluiceError):
    default_status = -10


class TimedOut(SluiceError, TimeoutError):
    default_status = -11


class Aborted(SluiceError):
    default_status = -12


class External(SluiceError):
    """A callback or an external library failed; `__cause__` is the callback's own exception."""

    default_status = -13


class OverBudget(SluiceError):
    default_status = -14


class InternalError(SluiceError):
    default_status = -15


class OverCapacity(SluiceError):
    default_status = -16


# By status: 0, -1, -2, ...
STATUS_NAMES = {
    -number: name
    for number, name in enumerate(
        "OK INVALID_ARGUMENT ABI NO_MEMORY BUSY UNSUPPORTED NOT_FOUND STATE MISMATCH PEER_REFUSED PEER_LOST TIMED_OUT "
        "ABORTED EXTERNAL OVER_BUDGET INTERNAL CAPACITY".split()
    )
}

# The classes above: LibraryNotFound, which has the status of NotFound, is a subclass of that.
_CLASSES: dict[int, type[SluiceError]] = {kind.default_status: kind for kind in SluiceError.__subclasses__()}


# The library's advice for a failed communicator (SLUICE_COMM_REMEDY of backend/comm/comm.h). In Python the host creates
# the process groups, and no host repairs a group that has lost a rank.
COMM_REMEDY = "destroy it and make a new one on all ranks"
HOST_REMEDY = "start all ranks again, from the last checkpoint (torchrun --max-restarts does it by itself)"


def from_status(status: int, message: str, peer: int = -1, native_code: int = 0) -> SluiceError:
    """Returns the exception for a status of the library."""
    kind = _CLASSES.get(status, SluiceError)
    return kind(message.replace(COMM_REMEDY, HOST_REMEDY), status=status, peer=peer, native_code=native_code)
