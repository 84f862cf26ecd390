#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs W rank processes over a shaped network link: `link.py --ranks 2 --rate 1gbit -- python3 train.py`.

Each rank gets the variables that torch.distributed reads (RANK, WORLD_SIZE, MASTER_ADDR, ...), its own core if there
are enough, and its own network namespace (see namespaces.py). With `--rate none`, or if namespaces are not allowed,
the ranks share plain loopback, and a message says so. Output is streamed line by line with the rank as prefix.

No rank survives this process, even if a rank fails, the deadline passes, or this process is interrupted or killed:
ranks are killed with this process by PR_SET_PDEATHSIG, and everything else is undone at the end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

if __package__ in (None, ""):  # started as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from integration_tests.net.namespaces import DEVICE, PORT, NamespaceError, Namespaces, parse_rate

TAIL_LINES = 15
GRACE_S = 8.0  # time for the others to detect by themselves that a rank has failed
DEADLINE_STATUS = 124  # as timeout(1)

Sink = Callable[[int, str], None]


def print_line(rank: int, line: str) -> None:
    """Prints `[rank] line` to stdout; the default sink."""
    sys.stdout.write(f"[{rank}] {line}\n")  # one write, newline included: print() would let ranks interleave
    sys.stdout.flush()


@dataclass
class Outcome:
    """Describes the end of a run. The status is 0 only if every rank returned 0."""

    status: int
    reason: str
    link: str
    tails: dict[int, list[str]] = field(default_factory=dict)


def _free_port() -> int:
    """Returns a loopback port below the ephemeral range, whose ports others could take before rank 0 listens."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.randrange(20000, 32000)))
            return int(probe.getsockname()[1])


@dataclass
class Link:
    """Makes a network for `world_size` ranks; a context manager. After entry, `description` describes the network."""

    world_size: int
    rate: str | None = "1gbit"
    user: bool | None = None
    ranks_per_node: int = 1  # consecutive ranks that share a namespace: its link to other ones, and loopback within
    description: str = field(default="", init=False)
    fallback: str = field(default="", init=False)
    _namespaces: Namespaces | None = field(default=None, init=False)
    _port: int = field(default=0, init=False)

    def __enter__(self) -> Link:
        """Makes the namespaces, or falls back to loopback, with the reason in `fallback`."""
        shaped = self.rate is not None and self.rate != "none"
        rate_bps = parse_rate(str(self.rate)) if shaped else 0.0
        if shaped:
            user = (os.geteuid() != 0) if self.user is None else self.user
            try:
                nodes = self.world_size // self.ranks_per_node
                self._namespaces = Namespaces(nodes, rate_bps, user).__enter__()
                way = "user namespaces" if user else "namespaces"
                shared = "" if self.ranks_per_node == 1 else f", one for each {self.ranks_per_node} ranks"
                self.description = f"{self.rate} ({way}, veth, tc tbf{shared})"
            except (NamespaceError, OSError, subprocess.TimeoutExpired) as why:
                self.fallback = f"No shaped link, the ranks talk over plain loopback: {why}."
        if self._namespaces is None:
            self.description = "loopback"
            self._port = _free_port()
        return self

    def __exit__(self, *_exc: object) -> None:
        """Removes the network."""
        if self._namespaces is not None:
            self._namespaces.close()
            self._namespaces = None
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):  # left by DeepSpeed
            buffer.unlink(missing_ok=True)

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the variables with which torch.distributed, gloo and DeepSpeed find the other ranks."""
        inside = self._namespaces is not None
        master = self._namespaces.address(0) if self._namespaces is not None else "127.0.0.1"
        device = DEVICE if inside and self.world_size > 1 else "lo"
        world = str(self.world_size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": world,
            "LOCAL_SIZE": world,
            "LOCAL_WORLD_SIZE": world,
            "MASTER_ADDR": master,
            "MASTER_PORT": str(PORT if inside else self._port),
            "GLOO_SOCKET_IFNAME": device,
            "TP_SOCKET_IFNAME": device,
            "LINK_DESCRIPTION": self.description,
        }

    def unplug(self, rank: int) -> None:
        """Cuts a rank off, for W > 2: its traffic is lost in both directions, and no rank is notified."""
        if self._namespaces is None:
            raise NamespaceError(f"the ranks talk over {self.description}, which has no cables")
        self._namespaces.unplug(rank)

    def start(self, rank: int, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Starts one rank. Call it from the main thread, whose end the kernel takes as the death of this process."""
        prefix = self._namespaces.enter_argv(rank // self.ranks_per_node) if self._namespaces is not None else []
        if shutil.which("setpriv") is not None:
            prefix = [*prefix, "setpriv", "--pdeathsig", "KILL", "--"]
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) >= self.world_size and shutil.which("taskset") is not None:
            prefix = [*prefix, "taskset", "-c", str(cores[rank])]
        return subprocess.Popen(
            [*prefix, *argv],
            env={**os.environ, "OMP_NUM_THREADS": "1", **env, **self.environment(rank)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )


class _Terminated(BaseException):
    """Signals that SIGTERM or SIGHUP arrived; unwinds like Ctrl-C."""


@contextlib.contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Turns SIGTERM and SIGHUP into an exception, so that `finally` runs for them too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(number: int, _frame: FrameType | None) -> None:
        raise _Terminated(number)

    old = {number: signal.signal(number, handler) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, previous in old.items():
            signal.signal(number, previous)


def _stop(children: Sequence[subprocess.Popen[str]]) -> None:
    """Terminates, waits a little, and kills. Signals go to process groups, as a rank may have child processes."""
    for number, timeout in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)
        end = time.monotonic() + timeout
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=max(0.0, end - time.monotonic()))


def _watch(children: Sequence[subprocess.Popen[str]], deadline_s: float, grace_s: float) -> tuple[int, str]:
    """Waits for all ranks; after the first failure the others have a moment to fail by themselves."""
    end = time.monotonic() + deadline_s
    failed: tuple[int, str] | None = None
    while True:
        codes = [child.poll() for child in children]
        if failed is None:
            for rank, code in enumerate(codes):
                if code:
                    how = f"was killed by signal {-code}" if code < 0 else f"returned {code}"
                    failed = (code if code > 0 else 1, f"rank {rank} {how}")
                    end = min(end, time.monotonic() + grace_s)
                    break
        if all(code is not None for code in codes):
            return failed or (0, "all ranks returned 0")
        if time.monotonic() > end:
            return failed or (DEADLINE_STATUS, f"the deadline of {deadline_s:g} s passed")
        time.sleep(0.05)


def run_ranks(
    argv: Sequence[str],
    *,
    world_size: int = 2,
    rate: str | None = "1gbit",
    deadline_s: float = 600.0,
    grace_s: float = GRACE_S,
    env: Mapping[str, str] | None = None,
    sink: Sink = print_line,
    announce: Callable[[str], None] | None = None,
    user: bool | None = None,
    ranks_per_node: int = 1,
) -> Outcome:
    """Runs `argv` once per rank over one network, and returns the outcome."""
    tails: dict[int, collections.deque[str]] = {r: collections.deque(maxlen=TAIL_LINES) for r in range(world_size)}

    def pump(rank: int, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            tails[rank].append(line.rstrip("\n"))
            sink(rank, line.rstrip("\n"))

    with _termination_unwinds(), Link(world_size, rate, user, ranks_per_node) as link:
        if announce is not None:
            announce(link.fallback or f"Link: {link.description}.")
        children: list[subprocess.Popen[str]] = []
        pumps: list[threading.Thread] = []
        try:
            for rank in range(world_size):
                children.append(link.start(rank, argv, env or {}))
                pumps.append(threading.Thread(target=pump, args=(rank, children[rank]), daemon=True))
                pumps[rank].start()
            status, reason = _watch(children, deadline_s, grace_s)
        finally:
            _stop(children)
            for thread in pumps:
                thread.join(timeout=2)
        return Outcome(status, reason, link.description, {rank: list(tail) for rank, tail in tails.items()})


def main() -> int:
    """Runs the command line: flags, `--`, and the command of each rank."""
    parser = argparse.ArgumentParser(description="Run rank processes over a shaped network link.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="1gbit", help="1gbit, 200mbit, 0.4gbit ..., or none for plain loopback")
    parser.add_argument("--deadline", type=float, default=600.0, help="seconds after which everything is stopped")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command or args.ranks < 1:
        parser.error("give a command after -- and at least one rank")
    try:
        outcome = run_ranks(
            command,
            world_size=args.ranks,
            rate=args.rate,
            deadline_s=args.deadline,
            announce=lambda text: print(text, flush=True),
        )
    except ValueError as why:
        parser.error(str(why))
    except KeyboardInterrupt:
        return 130
    except _Terminated as number:
        return 128 + int(number.args[0])
    if outcome.status != 0:
        print(f"Failed: {outcome.reason}. Last lines:", file=sys.stderr)
        for rank, tail in outcome.tails.items():
            for line in tail:
                print(f"  [{rank}] {line}", file=sys.stderr)
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
