# SPDX-License-Identifier: Apache-2.0
"""Makes Sluice's own process groups, one for each list of expert-parallel ranks.

gloo matches messages by issue order, so Sluice cannot share a group with the host: each list of ranks gets one more
gloo group, which all layers with these ranks share.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..._library import load
from ...errors import External, InvalidArgument, InvalidState, NotFound, PeerRefused
from ._native import generation, native
from .placement import Placement
from .rendezvous import Joined, join

_DEFAULT_TIMEOUT = timedelta(minutes=30)
_SETTLE_SECONDS = 3.0
_groups: dict[tuple[tuple[int, ...], str | None], EpGroup] = {}
_unshared: set[EpGroup] = set()


# Interfaces that the connections may use, comma-separated; gloo's own variable is read if this one is not set.
INTERFACES = "SLUICE_SOCKET_IFNAME"
_GLOO_INTERFACES = "GLOO_SOCKET_IFNAME"
_LONGEST_SECONDS = 30.0


def open_transport(library: Any, host: Any, transport: str | None, connect_timeout: float) -> Any:
    """Opens the communicator that layers use. It takes over `host`, the communicator of the gloo group.

    transport: "tcp", "c10d" (gloo itself), None: tcp if all ranks can reach each other, else c10d with a warning.
    connect_timeout: seconds until all connections are made, at most 30.
    Collective over the group, with the same outcome on all ranks. For "tcp" raises the library's error if it fails.
    """
    if transport == "c10d":
        return host
    ffi = library.ffi
    config = library.new("tcp_config")
    names = os.environ.get(INTERFACES) or os.environ.get(_GLOO_INTERFACES)
    held = ffi.new("char[]", names.encode()) if names else ffi.NULL
    config.interfaces = held
    config.connect_timeout_ns = int(min(connect_timeout, _LONGEST_SECONDS) * 1e9)
    out = ffi.new("sluice_comm_t **")
    try:
        library.check(library.lib.sluice_comm_create_tcp(host, config, out))
    except (NotFound, External, PeerRefused) as error:  # after any other error the gloo group is of no use either
        if transport == "tcp":
            raise
        warnings.warn(
            f"sluice: its own TCP connections are not available, so rows go through gloo, which is slower: {error} "
            f'({INTERFACES} names interfaces; "transport": "c10d" asks for gloo without this warning)',
            stacklevel=2,
        )
        return host
    library.lib.sluice_comm_destroy(host)
    return out[0]


def _host_timeout() -> timedelta:
    """Returns the timeout of the host's own group, so that both time out together."""
    try:
        return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return _DEFAULT_TIMEOUT


class EpGroup:
    """Has the ranks that share the experts of a layer, with a communicator over them. Made by `for_ranks`.

    ranks       global ranks, ascending
    rank        this process's index among them
    transport   the requested one: "tcp", "c10d", None: chosen by Sluice (transport.py)
    comm        the library's communicator; None for a group of one rank
    """

    def __init__(self, ranks: tuple[int, ...], timeout: timedelta | None, transport: str | None = None) -> None:
        self.ranks = ranks
        self.transport = transport
        self.world_size = len(ranks)
        self.rank = 0
        self.timeout = timeout or _DEFAULT_TIMEOUT
        self._joined: Joined | None = None
        self._host: Any = None
        self.comm: Any = None
        self._is_carried = False  # whether the transport of rows on the CPU has been chosen
        self._nccl: dict[int, Any] = {}  # by device; their callbacks stay alive in _keep
        self._keep: list[Any] = []
        self._host_names = [""]  # of all ranks
        self.closed = False
        self._generation = generation()
        self._contexts: weakref.WeakSet[Any] = weakref.WeakSet()
        if self.world_size > 1:
            self._connect(timeout)

    @classmethod
    def for_ranks(
        cls, ranks: Sequence[int] | None = None, timeout: timedelta | None = None, transport: str | None = None
    ) -> EpGroup:
        """Returns the group of these global ranks; None: this process alone.

        Collective over these ranks alone. A second call with the same transport returns the same group, whose timeout
        does not change; another timeout causes a warning.
        """
        key = (0,) if ranks is None else tuple(int(rank) for rank in ranks)
        if len(key) == 1:
            return cls(key, timeout, transport)
        if not key or list(key) != sorted(set(key)):
            raise InvalidArgument(f"ranks of an expert-parallel group must ascend without repeats, not {list(key)}")
        known = _groups.get((key, transport))
        if known is not None and known.alive:
            if timeout not in (None, known.timeout):
                stays, wanted = known.timeout.total_seconds(), timeout.total_seconds()
                warnings.warn(
                    f"ranks {list(key)} have already joined; their timeout stays {stays:g} s, {wanted:g} s has no "
                    "effect. Set it with the first model that uses these ranks",
                    stacklevel=2,
                )
            return known
        if known is not None:
            known.close()
        _close_at_exit()
        made = cls(key, timeout, transport)
        _groups[key, transport] = made
        return made

    @classmethod
    def unshared(cls, ranks: Sequence[int], timeout: timedelta | None = None, transport: str | None = None) -> EpGroup:
        """Returns a group of these global ranks, ascending, for one pipeline or optimizer alone. The caller closes it.

        Collective over the ranks named.
        """
        _close_at_exit()
        made = cls(tuple(ranks), timeout, transport)
        _unshared.add(made)
        return made

    @property
    def alive(self) -> bool:
        """Returns False once closed, in a forked child, and after the host has destroyed torch.distributed."""
        if self.closed or self._generation != generation():
            return False
        if self._joined is None:
            return True
        return dist.is_initialized() and self._host() is dist.group.WORLD

    def _connect(self, timeout: timedelta | None) -> None:
        if not dist.is_initialized():
            raise InvalidState(f"torch.distributed must be initialised before ranks {list(self.ranks)} can be joined")
        if dist.get_rank() not in self.ranks:
            raise InvalidArgument(f"rank {dist.get_rank()} is not one of {list(self.ranks)}")
        self.rank = self.ranks.index(dist.get_rank())
        self.timeout = timeout or _host_timeout()
        self._host = weakref.ref(dist.group.WORLD)
        # What one rank may lack (the library, a compiler) is loaded before any rank connects.
        self._joined, (library, opener) = join(self.ranks, lambda: (load(), native()), self.timeout)
        try:
            self._joined.meeting.compare("transport", self.transport or "chosen by Sluice")
            self._host_names = self._joined.meeting.all("host name", socket.gethostname())
            vtable, user = opener.open_group(library, self._joined.name)
            config, out = self._comm_config(), library.ffi.new("sluice_comm_t **")
            try:
                library.check(library.lib.sluice_comm_create_host(config, vtable, user, out))
            except BaseException:
                vtable.destroy(user)
                raise
            self.comm = out[0]
        except BaseException:
            self._joined.leave()
            raise

    def _comm_config(self) -> Any:
        config = load().new("comm_config")
        config.rank, config.world_size = self.rank, self.world_size
        config.timeout_ns = int(self.timeout.total_seconds() * 1e9)
        return config

    def comm_on(self, placement: Placement) -> Any:
        """Returns the communicator for contexts there; None for one rank. A device's first call is collective."""
        if self.comm is None:
            return None
        if not placement.is_cuda:
            if not self._is_carried:
                self.comm = open_transport(load(), self.comm, self.transport, self.timeout.total_seconds())
                self._is_carried = True
            return self.comm
        if placement.index not in self._nccl:
            self._nccl[placement.index] = self._connect_nccl(placement.index)
        return self._nccl[placement.index]

    def ranks_per_node(self) -> int:
        """Returns ranks per node by host names; 0 unless consecutive ranks share a host and hosts have equally many."""
        names = self._host_names
        found = sum(name == names[0] for name in names)
        nodes = [names[first : first + found] for first in range(0, len(names), found)]
        alike = all(len(set(node)) == 1 and len(node) == found for node in nodes)
        return found if alike and len({node[0] for node in nodes}) == len(nodes) else 0

    def carrier(self, placement: Placement) -> str:
        """Returns the transport of rows: "tcp", "host" (gloo), "nccl"; "none" for one rank. Collective as `comm_on`."""
        comm = self.comm_on(placement)
        if comm is None:
            return "none"
        library = load()
        return library.ffi.string(library.lib.sluice_comm_name(comm)).decode()

    def _connect_nccl(self, device_id: int) -> Any:
        """Connects NCCL; rank 0's id goes to the others through the group's store, as in torch's own NCCL groups."""
        library = load()
        ffi, meeting, phase = library.ffi, self._joined.meeting, f"NCCL {len(self._nccl)}"
        size = ffi.integer_const("SLUICE_NCCL_ID_BYTES")
        identity = ffi.new("char[]", size)

        def make_id() -> None:
            if self.rank == 0:
                library.check(library.lib.sluice_nccl_id_create(ffi.NULL, identity))
                meeting.write(f"{phase} id", bytes(ffi.buffer(identity)))

        meeting.attempt(f"make an id for {phase}", make_id)
        ffi.memmove(identity, meeting.read(f"{phase} id"), size)

        @ffi.callback("void(void *, const char *, const char *)")
        def publish(user: Any, key: Any, value: Any) -> None:
            with contextlib.suppress(Exception):  # at exit the store may be gone
                meeting.write(f"{phase} {ffi.string(key).decode()}", ffi.string(value))

        @ffi.callback("int32_t(void *, const char *, char *, int32_t)")
        def lookup(user: Any, key: Any, out: Any, room: int) -> int:
            try:
                text = meeting.look(f"{phase} {ffi.string(key).decode()}")
            except Exception:
                return -1
            ffi.memmove(out, text[:room], min(len(text), room))
            return min(len(text), room)

        self._keep += [publish, lookup]
        config, group = self._comm_config(), library.new("nccl_group")
        group.device_id, group.id = device_id, identity
        group.publish, group.lookup = publish, lookup
        out = ffi.new("sluice_comm_t **")
        meeting.attempt(f"join {phase}", lambda: library.check(library.lib.sluice_comm_create_nccl(config, group, out)))
        return out[0]

    def _comms(self) -> list[Any]:
        return [comm for comm in (*self._nccl.values(), self.comm) if comm is not None]

    def adopt(self, context: Any) -> None:
        """Closes this context before the group, because it uses the group's communicator."""
        self._contexts.add(context)

    def abort(self) -> None:
        """Makes every wait of this rank fail soon; peers are notified at once. Any thread may call it."""
        if not self.closed and self._generation == generation():
            for comm in self._comms():
                load().lib.sluice_comm_abort(comm)

    def close(self) -> None:
        """Releases the communicator and the process group, and the contexts on them. Not collective."""
        if self.closed:
            return
        self.closed = True
        _unshared.discard(self)
        if _groups.get((self.ranks, self.transport)) is self:
            del _groups[self.ranks, self.transport]
        if self._generation != generation():
            return  # it was made in the parent, whose threads do not exist here
        if not self._settle():
            return  # a thread is still inside the library: what it uses is freed by the end of the process
        for context in list(self._contexts):
            context.close()
        comms = self._comms()
        self.comm, self._nccl = None, {}
        for comm in comms:
            load().lib.sluice_comm_destroy(comm)
        if self._joined is not None:
            self._joined.leave()

    def _settle(self) -> bool:
        """Aborts passes of other threads (at exit: daemon threads). Returns whether none is left."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while any(context.calls for context in self._contexts):
            for comm in self._comms():
                load().lib.sluice_comm_abort(comm)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def __repr__(self) -> str:
        state = "alive" if self.alive else "closed"
        return f"EpGroup(ranks={list(self.ranks)}, rank={self.rank}, {state})"


def _close_at_exit() -> None:
    if not _groups and not _unshared:
        # Registered late, so that it runs before the exit handlers of everything imported until now.
        atexit.unregister(_close_all)
        atexit.register(_close_all)


def _close_all() -> None:
    """Runs at exit, while torch and its groups still exist. Outstanding steps hold no handle, so none is waited for."""
    for group in [*_groups.values(), *_unshared]:
        with contextlib.suppress(Exception):
            group.close()
