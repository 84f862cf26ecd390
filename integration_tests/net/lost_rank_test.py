# SPDX-License-Identifier: Apache-2.0
"""Tests that the others soon name a rank whose cable is pulled, over a switch of network namespaces.

backend/comm/test/tcp_keepalive_test.c drops the packets of connections that are idle, in use or full, and of peers that
still answer.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from integration_tests.net.link import Link

PROGRAM = Path(__file__).resolve().parent / "lost_rank.py"
SOON_S = 40  # enough for a busy machine, and far below the ranks' deadline of 150 s
WORLD = 3

pytest.importorskip("sluice.adapters.torch")


def _line(rank: int, child: subprocess.Popen[str], *beginnings: str) -> str:
    """Returns the next line of a rank with one of these beginnings."""
    assert child.stdout is not None
    said = []
    for line in child.stdout:
        said.append(line)
        if line.startswith(beginnings):
            return line.rstrip("\n")
    raise AssertionError(f"rank {rank} has not said {beginnings}: {said}")


@pytest.mark.timeout(300)
def test_CableIsPulled_OthersWaitOrSend_LoseItByNameSoon(tmp_path: Path) -> None:
    """Rank 0 waits with nothing in flight, and rank 1 sends to a rank that is cut off."""
    children: list[subprocess.Popen[str]] = []
    with Link(WORLD, "1gbit") as link:
        if link.fallback:
            pytest.skip(link.fallback)
        try:
            for rank in range(WORLD):
                children.append(link.start(rank, [sys.executable, str(PROGRAM), str(tmp_path / "cut")], {}))
            for rank, child in enumerate(children):
                _line(rank, child, "ready")
            time.sleep(3)  # rank 0 is usually waiting by then, and its messages are confirmed
            link.unplug(2)
            cut = time.monotonic()
            (tmp_path / "cut").touch()
            for rank, child in enumerate(children):
                line = _line(rank, child, "lost", "passed")
                assert line.startswith("lost"), line
                name, peer, when = line.split()[1:4]
                print(f"rank {rank} after {float(when) - cut:.1f} s: {line}")
                assert name == "PeerLost" and (peer == "2" if rank < 2 else peer in "01"), line
                assert rank == 2 or float(when) - cut < SOON_S, line
        finally:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
