# SPDX-License-Identifier: Apache-2.0
"""Makes network namespaces that are joined by shaped veth pairs, one namespace per rank.

No name outlives this process. A namespace exists only while a process is in it, so each one is held by a `cat` that
reads a pipe of this process. When this process ends or crashes, the pipes close, the holders exit, and the kernel
removes the namespaces and their links. So a crash leaves nothing, and two concurrent runs cannot interfere. The
machine's own network is not changed: every veth is created inside a held namespace.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

TOOLS = ("ip", "tc", "unshare", "nsenter")
SUBNET = "10.77.0"  # private to namespaces that have no route to anywhere else
DEVICE = "eth0"
PORT = 29500  # free by construction: the namespace is new
QUEUE_S = 50e-3  # line time of the queue at a card: a small switch's buffer
PACKET_S = 200e-6  # line time of the largest packet that a rank passes to its card (segmentation offload)

_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class NamespaceError(RuntimeError):
    """Reports that the network cannot be made on this machine, with the reason in one sentence."""


def parse_rate(text: str) -> float:
    """Converts `1gbit`, `200mbit` or `0.4gbit` to bits per second."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(bit|kbit|mbit|gbit)\s*", text.lower())
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"rate {text!r} is not understood; write for example 1gbit, 200mbit or 0.4gbit, or none")
    return float(match[1]) * _UNITS[match[2]]


def packet_bytes(rate_bps: float) -> int:
    """Returns the size of the largest packet of such a link: segmentation offload joins a few Ethernet frames."""
    return min(65_536, max(9_000, int(rate_bps / 8 * PACKET_S)))


def burst_bytes(rate_bps: float) -> int:
    """Returns the burst of an idle link: two packets, so that the shaper never splits one.

    This is 0.4 ms of line time from 0.36 Gbit/s on, and 0.72 ms at 0.2 Gbit/s. A larger bucket makes short messages
    faster than the rate: an exchange of 100 KB after a pause took no time with 128 KiB at 0.2 Gbit/s, and neither with
    1 ms at 1 Gbit/s.
    """
    return 2 * packet_bytes(rate_bps)


def _tbf(rate_bps: float) -> list[str]:
    latency = ["latency", f"{QUEUE_S * 1e3:g}ms"]
    return ["tbf", "rate", f"{round(rate_bps)}bit", "burst", f"{burst_bytes(rate_bps)}b", *latency]


@dataclass
class Namespaces:
    """Makes W namespaces, joined directly for W = 2, and through a bridge in one more namespace for W > 2.

    Every direction of every cable carries `rate`. As root the namespaces are made directly; otherwise inside one user
    namespace in which this process is root (`user=True` forces that, for tests).
    """

    world_size: int
    rate_bps: float
    user: bool = field(default_factory=lambda: os.geteuid() != 0)
    _holders: list[subprocess.Popen[bytes]] = field(default_factory=list, init=False)

    def __enter__(self) -> Namespaces:
        """Builds everything, or raises NamespaceError with nothing left."""
        missing = [tool for tool in TOOLS if shutil.which(tool) is None]
        if missing:
            raise NamespaceError(f"the commands {', '.join(missing)} are not installed (iproute2, util-linux)")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        """Ends the holders; the kernel removes the network."""
        self.close()

    def enter_argv(self, index: int) -> list[str]:
        """Returns the command prefix that runs a program inside namespace `index`."""
        user = ["--user", "--preserve-credentials"] if self.user else []
        return ["nsenter", "-t", str(self._holders[index].pid), *user, "--net", "--"]

    def address(self, rank: int) -> str:
        """Returns the address of a rank on the shaped network."""
        return f"{SUBNET}.{rank + 1}"

    def unplug(self, rank: int) -> None:
        """Disconnects a rank from the switch, for W > 2: the cards of the others do not notice it."""
        if self.world_size <= 2:
            raise ValueError("two ranks are joined directly, there is no switch")
        self._run(self.world_size, ["ip", "link", "set", f"port{rank}", "down"])

    def close(self) -> None:
        """Closes the pipes that the holders read, and waits for the holders."""
        for holder in self._holders:
            if holder.stdin is not None:
                holder.stdin.close()
        for holder in self._holders:
            try:
                holder.wait(timeout=2)
            except subprocess.TimeoutExpired:
                holder.kill()
                holder.wait()
        self._holders.clear()

    def _build(self) -> None:
        bridged = self.world_size > 2
        for _ in range(self.world_size + bridged):
            self._hold()
        hub = self.world_size
        if bridged:
            self._run(hub, ["ip", "link", "add", "br0", "type", "bridge"])
            self._run(hub, ["ip", "link", "set", "br0", "up"])
            for rank in range(self.world_size):
                self._cable(rank, DEVICE, hub, f"port{rank}")
                self._run(hub, ["ip", "link", "set", f"port{rank}", "master", "br0"])
        else:
            for rank in range(1, self.world_size):
                self._cable(0, DEVICE, rank, DEVICE)
        for rank in range(self.world_size):
            self._run(rank, ["ip", "link", "set", "lo", "up"])
            if self.world_size > 1:
                self._run(rank, ["ip", "addr", "add", f"{self.address(rank)}/24", "dev", DEVICE])
            else:
                self._run(rank, ["ip", "addr", "add", f"{self.address(rank)}/32", "dev", "lo"])

    def _cable(self, a: int, a_name: str, b: int, b_name: str) -> None:
        """Makes one veth pair, with both ends shaped: the rank's output, and the switch's output to the rank."""
        peer_pid = str(self._holders[b].pid)
        # `netns PID` moves the far end at birth; in a user namespace it must be owned by the same user namespace.
        self._run(a, ["ip", "link", "add", a_name, "type", "veth", "peer", "name", b_name, "netns", peer_pid])
        for index, name in ((a, a_name), (b, b_name)):
            self._run(index, ["tc", "qdisc", "add", "dev", name, "root", *_tbf(self.rate_bps)])
            packet = str(packet_bytes(self.rate_bps))
            self._run(index, ["ip", "link", "set", "dev", name, "gso_max_size", packet])
            self._run(index, ["ip", "link", "set", name, "up"])

    def _hold(self) -> None:
        """Starts one more holder: a process in a new namespace that exits when our end of its stdin closes."""
        if not self.user:
            argv = ["unshare", "--net"]
        elif not self._holders:
            argv = ["unshare", "--user", "--map-root-user", "--net"]
        else:  # the same user namespace as the first, so that links may move between them
            argv = ["nsenter", "-t", str(self._holders[0].pid), "--user", "--preserve-credentials", "unshare", "--net"]
        # A new session: Ctrl-C on the terminal must end this process, but not the holders.
        holder = subprocess.Popen(
            [*argv, "--", "sh", "-c", "echo up; exec cat >/dev/null"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != b"up\n":
            holder.wait(timeout=10)
            why = holder.stderr.read().decode(errors="replace").strip()
            raise NamespaceError(f"a network namespace could not be made ({why or 'no reason given'})")
        holder.stdout.close()
        holder.stderr.close()

    def _run(self, index: int, argv: Sequence[str]) -> None:
        done = subprocess.run([*self.enter_argv(index), *argv], capture_output=True, text=True, timeout=20)
        if done.returncode != 0:
            why = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
            raise NamespaceError(f"`{' '.join(argv)}` failed ({why[-1]})")
