# SPDX-License-Identifier: Apache-2.0
"""Makes a link stall: during a batch, the messages of one rank wait for 50 ms at random times.

The draws depend on the batch, so every side has the same stalls at the same times after its begin. The rank shapes its
own end of the link, so it must be root in its network namespace.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from integration_tests.benchmarks.stages.stages_draws import STALL_S, gaps
from integration_tests.net.namespaces import DEVICE, QUEUE_S, SUBNET, burst_bytes, parse_rate

STALLED_BPS = 8_000.0  # nearly zero


def shape(rate_bps: float, usual_bps: float) -> None:
    """Change the rate at which this rank sends. Burst and limit stay those of the usual rate."""
    burst = burst_bytes(usual_bps)
    room = round(usual_bps / 8 * QUEUE_S) + burst
    queue = ["rate", f"{round(rate_bps)}bit", "burst", f"{burst}b", "limit", f"{room}b"]
    subprocess.run(["tc", "qdisc", "change", "dev", DEVICE, "root", "tbf", *queue], check=True, timeout=10)


def wake(rank: int) -> None:
    """Sends one small packet, because packets that wait have a timer of the old rate until a new packet comes."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_packet:
        any_packet.sendto(b"", (f"{SUBNET}.{1 if rank else 2}", 9))


class _Stalls:
    """A thread that makes the stalls of one batch."""

    def __init__(self, link: str, batch: int, rank: int) -> None:
        self.count = 0
        self.error: Exception | None = None
        self._rate, self._batch, self._rank = parse_rate(link), batch, rank
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._stall()
        except Exception as error:  # reported by the code that joins this thread
            self.error = error

    def _stall(self) -> None:
        begin = time.monotonic()
        at = 0.0
        for gap in gaps(self._batch):
            at += gap
            if self._ended.wait(max(0.0, begin + at - time.monotonic())):
                return
            shape(STALLED_BPS, self._rate)
            time.sleep(STALL_S)
            shape(self._rate, self._rate)
            wake(self._rank)
            self.count += 1
            at += STALL_S


@contextlib.contextmanager
def stalling(plan: dict[str, Any], rank: int, batch: int) -> Iterator[None]:
    """Makes the link stall on the rank of plan["stalls"], {"rank", "link"}, and does nothing on other ranks. Raises
    RuntimeError if the link never stalled."""
    wanted = plan.get("stalls")
    if not wanted or wanted["rank"] != rank:
        yield
        return
    stalls = _Stalls(wanted["link"], batch, rank)
    try:
        yield
    finally:
        stalls.end()
    if stalls.error is not None or stalls.count == 0:
        raise RuntimeError(f"batch {batch}: the link of rank {rank} stalled {stalls.count} times") from stalls.error
