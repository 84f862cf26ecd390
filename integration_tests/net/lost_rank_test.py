# SPDX-License-Identifier: Apache-2.0
"""Tests that the others soon name a rank whose cable is pulled, and that they wait for a stopped rank.

Each set of ranks has its own network, and all sets run at the same time, as they mostly wait.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from integration_tests.net.link import Link

PROGRAM = Path(__file__).resolve().parent / "lost_rank.py"
STOPPED_S = 20  # above the 12 s after which a machine that does not answer counts as lost
SOON_S = 40  # enough for a busy machine, and far below the ranks' deadline of 150 s
TIMEOUT_S = 120

pytest.importorskip("sluice.adapters.torch")


class Ranks:
    """Runs the ranks of one scenario over their own link, and keeps the lines that they have written."""

    def __init__(self, scenario: str, world_size: int, rate: str) -> None:
        self.link = Link(world_size, rate)
        self.scenario = scenario
        self.lines: list[list[str]] = [[] for _ in range(world_size)]
        self.children: list[subprocess.Popen[str]] = []
        self.skipped = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[Ranks]:
        """Starts all ranks; none remains at the end."""
        with tempfile.TemporaryDirectory(prefix="sluice_lost_") as folder, self.link:
            self.folder = Path(folder)
            self.skipped = self.link.fallback
            try:
                if not self.skipped:
                    for rank in range(self.link.world_size):
                        self._start(rank)
                yield self
            finally:
                for child in self.children:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                    child.wait()

    def _start(self, rank: int) -> None:
        child = self.link.start(rank, [sys.executable, str(PROGRAM), self.scenario, str(self.folder)], {})
        self.children.append(child)

        def read() -> None:
            assert child.stdout is not None
            for line in child.stdout:
                self.lines[rank].append(line.rstrip("\n"))

        threading.Thread(target=read, daemon=True).start()

    def require(self) -> None:
        """Skips the test with the reason if the network could not be made."""
        if self.skipped:
            pytest.skip(self.skipped)

    def await_line(self, rank: int, *beginnings: str) -> str:
        """Waits for the first line of a rank with one of these beginnings."""
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            for line in self.lines[rank]:
                if line.startswith(beginnings):
                    return line
            time.sleep(0.02)
        raise AssertionError(f"{self.scenario}: rank {rank} has not said {beginnings}: {self.lines}")

    def tell(self, name: str) -> None:
        (self.folder / name).touch()


def _ready(ranks: Ranks) -> None:
    for rank in range(ranks.link.world_size):
        ranks.await_line(rank, "ready")


def _cut(ranks: Ranks) -> float:
    """Pulls the last rank's cable, and returns the time."""
    _ready(ranks)
    if ranks.scenario == "idle":
        time.sleep(3)  # the others are usually waiting by then, and their messages are confirmed
    ranks.link.unplug(2)
    cut = time.monotonic()
    ranks.tell("cut")
    return cut


def _unconfirmed(pid: int) -> int:
    """Returns the unacknowledged bytes in a process's network, of the connection with the most."""
    most = 0
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            most = max(most, int(line.split()[4].split(":")[0], 16))
    return most


def _stop(ranks: Ranks) -> None:
    """Stops rank 1 while rank 0 has more bytes for it than the system's buffers hold."""
    _ready(ranks)
    for _ in range(100):
        ranks.children[1].send_signal(signal.SIGSTOP)
        time.sleep(1)  # until everything that fits the buffers has been sent
        if _unconfirmed(ranks.children[0].pid) >= 1 << 16:
            threading.Timer(STOPPED_S, _go_on, [ranks]).start()
            return
        ranks.children[1].send_signal(signal.SIGCONT)
        time.sleep(random.uniform(0.1, 0.5))
    raise AssertionError(f"rank 0 never has bytes left for a rank that is stopped: {ranks.lines}")


def _go_on(ranks: Ranks) -> None:
    ranks.children[1].send_signal(signal.SIGCONT)
    with contextlib.suppress(FileNotFoundError):  # the tests have ended before that
        ranks.tell("over")


@pytest.fixture(scope="module")
def scenarios() -> Iterator[dict[str, Ranks]]:
    """Runs all scenarios at the same time."""
    with contextlib.ExitStack() as stack:
        every = (Ranks("idle", 3, "1gbit"), Ranks("sending", 3, "1gbit"), Ranks("stopped", 2, "200mbit"))
        yield {ranks.scenario: stack.enter_context(ranks.running()) for ranks in every}


@pytest.fixture(scope="module")
def cuts(scenarios: dict[str, Ranks]) -> dict[str, float]:
    """Returns the times at which cables were pulled; rank 1 of the third scenario is stopped for a while."""
    for ranks in scenarios.values():
        ranks.require()
    _stop(scenarios["stopped"])
    return {name: _cut(scenarios[name]) for name in ("idle", "sending")}


@pytest.mark.parametrize("scenario", ["idle", "sending"])
def test_CableIsPulled_OthersWait_LoseItByNameSoon(
    scenarios: dict[str, Ranks], cuts: dict[str, float], scenario: str
) -> None:
    """This holds with unacknowledged messages, and with nothing in flight."""
    ranks = scenarios[scenario]
    for rank in (0, 1):
        line = ranks.await_line(rank, "lost", "passed", "failed")
        name, peer, when = line.split()[1:4]
        took = float(when) - cuts[scenario]
        print(f"{scenario}: rank {rank} after {took:.1f} s: {line}")
        assert (name, peer) == ("PeerLost", "2"), line
        assert took < SOON_S, line
    line = ranks.await_line(2, "lost", "passed", "failed")  # rank 2 has lost both others
    assert line.split()[1] == "PeerLost" and line.split()[2] in "01", line


@pytest.mark.usefixtures("cuts")
def test_RankIsStopped_ForLongerThanSilenceMay_IsWaitedFor(scenarios: dict[str, Ranks]) -> None:
    """The kernel of a stopped rank still answers that its buffer is full."""
    ranks = scenarios["stopped"]
    for rank in (0, 1):
        assert ranks.await_line(rank, "same", "different", "failed") == "same"
