# SPDX-License-Identifier: Apache-2.0
"""Runs passes of a layer until a rank is cut off, or stopped for a while. Each rank of lost_rank_test runs it.

A rank prints its progress in lines. The test controls the ranks by files in the folder `argv[2]`.
"""

import contextlib
import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, EpGroup, MoeConfig, MoeLayer
from sluice.errors import SluiceError

FOLDER = Path(sys.argv[2])
DEADLINE_S = 150.0
WIDTH = 512


def say(text: str) -> None:
    print(text, flush=True)


def await_file(name: str) -> None:
    """Waits until the test has written the file."""
    while not (FOLDER / name).exists():
        time.sleep(0.02)


class Passes:
    """Runs forward passes of one layer, whose rows go to all ranks equally."""

    def __init__(self, tokens: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        group = EpGroup.for_ranks(range(world), timeout=timedelta(seconds=DEADLINE_S), transport="tcp")
        self.layer = MoeLayer(
            Context(group), MoeConfig(model_width=WIDTH, hidden_width=8, num_experts=world, top_k=1, chunks=2)
        )
        self.tokens = torch.full((tokens, WIDTH), float(rank + 1))
        self.ids = (torch.arange(tokens) % world).reshape(-1, 1)
        self.weights = torch.ones(tokens, 1)
        self.params = [{"w1": torch.ones(8, WIDTH) / WIDTH, "w2": torch.ones(WIDTH, 8)}]

    def once(self) -> torch.Tensor:
        with torch.no_grad():
            return self.layer(self.tokens, self.ids, self.weights, self.params)


def cut_off(is_idle: bool) -> None:
    """Waits until the last rank is cut off, while the others wait with nothing in flight, or before they send."""
    passes = Passes(tokens=64)
    passes.once()
    is_last = dist.get_rank() == dist.get_world_size() - 1
    if is_last or not is_idle:
        say("ready")
        await_file("cut")
    else:
        say("ready")
    try:
        passes.once()
        say("passed")
    except SluiceError as error:
        say(f"lost {type(error).__name__} {error.peer} {time.monotonic():.3f} {error}")


def take_little() -> None:
    """Limits unread bytes of each connection of this process to a quarter MiB, far less than a chunk."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)


def stopped() -> None:
    """Runs passes that mostly wait for the link; the test stops rank 1 in the middle of one."""
    passes = Passes(tokens=32768)
    first = passes.once()
    take_little()
    say("ready")
    while True:
        same = torch.equal(passes.once(), first)
        is_over = torch.tensor([int((FOLDER / "over").exists())])
        dist.broadcast(is_over, 0)
        if not same or is_over:
            break
    say("same" if same else "different")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    scenario = sys.argv[1]
    try:
        if scenario == "stopped":
            stopped()
        else:
            cut_off(is_idle=scenario == "idle")
    except Exception as error:
        say(f"failed {type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)  # ranks that are cut off cannot destroy the group in order


if __name__ == "__main__":
    main()
