# SPDX-License-Identifier: Apache-2.0
"""Makes one more gloo group for a list of ranks, or fails on all of them with the same reason.

`dist.new_group(use_local_synchronization=True)` is not used, because it names a group by its ranks and by the number of
groups that this process is in. Ranks in different numbers of groups (pipeline stages) then wait for each other under
different names; and a group made again under its old name finds the old group's addresses in the store. Here the name
counts how often this list of ranks has been joined, which is the same on all of them.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...errors import External, Mismatch, PeerLost, PeerRefused, TimedOut

_joined: dict[tuple[int, ...], int] = {}


def _this_system() -> str:
    """Returns an identifier of the machine, which its containers share. Host names may be equal on several machines."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


class Joined:
    """Has a process group that only Sluice uses; `name` is its key in c10d's registry."""

    def __init__(self, name: str, group: Any, meeting: _Meeting) -> None:
        self.name = name
        self.group = group
        self.meeting = meeting

    def leave(self) -> None:
        """Unregisters the group; its connections close when the communicator is destroyed as well."""
        if self.group is None:
            return
        self.group = None
        with contextlib.suppress(Exception):  # the host may have cleared the registry
            torch._C._distributed_c10d._unregister_process_group(self.name)


class _Meeting:
    """Exchanges messages between the ranks of a group in the host's store."""

    def __init__(self, store: Any, ranks: tuple[int, ...], place: int, timeout: timedelta) -> None:
        self._store = store
        self._ranks = ranks
        self._place = place
        self._seconds = timeout.total_seconds()
        self._layout: str | None = None

    def attempt(self, phase: str, action: Callable[[], Any]) -> Any:
        """Runs `action` here; returns its result once it has succeeded on every rank."""
        error: Exception | None = None
        result = None
        try:
            result = action()
        except Exception as caught:
            error = caught
        self._store.set(f"{phase}/{self._place}", "" if error is None else f"{error}"[:400] or repr(error))
        if error is not None:
            raise error
        keys = [f"{phase}/{place}" for place in range(len(self._ranks))]
        try:
            self._wait(phase, keys)
        except dist.DistError as gone:
            text = f"the store of torch.distributed went away while ranks {list(self._ranks)} joined: {gone}"
            raise PeerLost(text) from gone
        for place, key in enumerate(keys):
            text = self._store.get(key).decode(errors="replace")
            if text:
                raise PeerRefused(f"rank {self._ranks[place]} could not {phase}: {text}", peer=place)
        return result

    def say_host(self) -> None:
        """Writes this rank's machine to the store, before the first `attempt`, so that ranks can read it afterwards."""
        self._store.set(f"host/{self._place}", _this_system())

    def layout(self) -> str:
        """Returns the ranks' hosts: "1 host", or their number and each rank's first rank there. After an `attempt`."""
        if self._layout is None:  # read once: at exit the store may be gone
            said = [self.read(f"host/{place}") for place in range(len(self._ranks))]
            shared = " ".join(str(said.index(each)) for each in said)
            self._layout = "1 host" if len(set(said)) == 1 else f"{len(set(said))} hosts ({shared})"
        return self._layout

    def compare(self, what: str, mine: str) -> None:
        """Raises Mismatch on all ranks unless all give the same text."""
        said = dict(zip(self._ranks, self.all(what, mine)))
        if len(set(said.values())) > 1:
            listed = ", ".join(f"rank {rank}: {text}" for rank, text in said.items())
            raise Mismatch(f"the ranks differ in their {what}: {listed}; configure all of them the same")

    def all(self, what: str, mine: str) -> list[str]:
        """Returns the text that each rank gives."""
        self._store.set(f"{what}/{self._place}", mine)
        keys = [f"{what}/{place}" for place in range(len(self._ranks))]
        self._wait(f"compare the {what}", keys)
        return [self._store.get(key).decode(errors="replace") for key in keys]

    def write(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def read(self, key: str) -> bytes:
        """Returns the value that a rank writes; waits for it."""
        return bytes(self._store.get(key))

    def look(self, key: str) -> bytes:
        """Returns the value without waiting; empty if no rank has written it."""
        return bytes(self._store.get(key)) if self._store.check([key]) else b""

    def first(self, phase: str, make: Callable[[], bytes]) -> bytes:
        """Returns the first rank's result of `make` on all ranks. If `make` fails, all ranks raise. Once per phase."""
        if self._place == 0:
            try:
                made = make()
            except Exception as error:
                self.write(phase, b"-" + f"{error}"[:400].encode())
                raise
            self.write(phase, b"+" + made)
            return made
        self._wait(phase, [phase])
        said = self.read(phase)
        if said[:1] == b"-":
            told = said[1:].decode(errors="replace")
            raise PeerRefused(f"rank {self._ranks[0]} could not {phase}: {told}", peer=0)
        return said[1:]

    def _wait(self, phase: str, keys: list[str]) -> None:
        """Waits by polling, so that Ctrl-C works and the error at the deadline can name the missing rank."""
        deadline = time.monotonic() + self._seconds
        pause = 0.001
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = next(place for place, key in enumerate(keys) if not self._store.check([key]))
                text = f"rank {self._ranks[missing]} did not reach {phase} within {self._seconds:.0f} s"
                raise TimedOut(f"{text}; every rank of {list(self._ranks)} must join at the same point", peer=missing)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)


def join(ranks: tuple[int, ...], prepare: Callable[[], Any], timeout: timedelta) -> tuple[Joined, Any]:
    """Makes the group. Collective over `ranks` (global, ascending; this process is one of them).

    prepare  must succeed on every rank before they connect; its result is returned too
    """
    count = _joined.get(ranks, 0)
    _joined[ranks] = count + 1
    name = f"sluice/{'_'.join(map(str, ranks))}/{count}"
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())
    place = ranks.index(dist.get_rank())
    meeting = _Meeting(store, ranks, place, timeout)
    meeting.say_host()
    prepared = meeting.attempt("prepare", prepare)

    def connect() -> Any:
        group = dist.ProcessGroup(store, place, len(ranks))
        try:
            backend = dist.ProcessGroupGloo(store, place, len(ranks), timeout=timeout)
        except RuntimeError as error:
            raise External(f"gloo cannot connect ranks {list(ranks)}: {error}") from error
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        group._set_group_name(name)
        torch._C._distributed_c10d._register_process_group(name, group)
        return group

    return Joined(name, meeting.attempt("connect", connect), meeting), prepared
