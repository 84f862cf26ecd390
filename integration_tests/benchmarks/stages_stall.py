"""A link that stalls: while a batch runs, what one rank sends waits for 50 ms now and then, at drawn times.

Draws are those of the batch, whoever runs it: every side meets the same stalls at the same times after its begin. The
rank shapes its own end of the cable, so it must be root in its network namespace.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

from integration_tests.net.namespaces import DEVICE, burst_bytes, parse_rate

STALL_S = 0.05
MEAN_GAP_S = 0.4
STALLED_BPS = 8_000.0  # as good as nothing
ROOM_BYTES = 1 << 20  # of the queue: what waits is not lost


def shape(rate_bps: float, burst: int) -> None:
    """Change the rate of what this rank sends."""
    queue = ["rate", f"{round(rate_bps)}bit", "burst", f"{burst}b", "limit", f"{ROOM_BYTES}b"]
    subprocess.run(["tc", "qdisc", "change", "dev", DEVICE, "root", "tbf", *queue], check=True, timeout=10)


def gaps(batch: int) -> Iterator[float]:
    """Seconds between the stalls of a batch."""
    draws = random.Random(f"{batch} stall")
    while True:
        yield draws.expovariate(1 / MEAN_GAP_S)


def _stall(link: str, batch: int, ended: threading.Event) -> None:
    rate = parse_rate(link)
    begin = time.monotonic()
    at = 0.0
    for gap in gaps(batch):
        at += gap
        if ended.wait(max(0.0, begin + at - time.monotonic())):
            return
        shape(STALLED_BPS, burst_bytes(rate))
        time.sleep(STALL_S)
        shape(rate, burst_bytes(rate))
        at += STALL_S


@contextlib.contextmanager
def stalling(plan: dict[str, Any], rank: int, batch: int) -> Iterator[None]:
    """plan["stalls"]: {"rank", "link"}; without it, and on other ranks, nothing happens."""
    stalls = plan.get("stalls")
    if not stalls or stalls["rank"] != rank:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_stall, args=(stalls["link"], batch, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
