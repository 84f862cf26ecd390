# SPDX-License-Identifier: Apache-2.0
"""One rank of `rank_harness.Ranks`: joins the group, then runs its commands, line by line. The script is a rank with
DeepSpeed."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any


def _never_outlive() -> None:
    """Makes this process end with its parent, which is the tests or a rank, even inside a collective."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _join(door: int) -> None:
    """Joins the group. Rank 0's store listens at `door`, a socket of the harness, so that the port cannot be taken."""
    import torch.distributed as dist

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    listening = {"is_master": True, "master_listen_fd": door} if rank == 0 else {}
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        world,
        timeout=timedelta(minutes=5),
        wait_for_workers=False,
        **listening,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def _seed_the_cpu_alone() -> None:
    """Makes torch.manual_seed skip other devices. For each kind of device that is not initialized, torch.manual_seed
    records a stack trace, which takes longer than the layers of a pipeline that seeds its layers."""
    import torch

    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None


def main(prepare: Callable[[], Any] | None = None, joined: Callable[[], Any] | None = None) -> None:
    """Runs the rank. Replies go to an inherited descriptor, so that any code may print.

    prepare: runs before torch's import; joined: runs after the rank has joined the group
    """
    _never_outlive()
    os.register_at_fork(after_in_child=_never_outlive)
    faulthandler.enable()  # prints the stacks of all threads if the rank crashes
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the harness to a hanging rank
    replies = os.fdopen(int(sys.argv[1]), "w")

    def answer(action: Callable[[], Any]) -> None:
        try:
            value = {"result": action()}
        except Exception as error:
            text = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            value = {"error": text}
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    def start() -> None:
        if prepare is not None:
            prepare()
        import torch

        torch.set_num_threads(1)
        _seed_the_cpu_alone()
        _join(int(sys.argv[2]))
        if joined is not None:
            joined()

    answer(start)
    for line in sys.stdin:
        order = json.loads(line)
        module, _, function = order["target"].partition(":")
        answer(lambda: getattr(importlib.import_module(module), function)(**order["arguments"]))  # noqa: B023
    for child in multiprocessing.active_children():  # some hosts write checkpoints in child processes
        child.kill()
    # Do not end the process group: a rank whose peers were killed would wait.
    os._exit(0)


def _import_deepspeed() -> None:
    importlib.import_module("deepspeed")
    # DeepSpeed uses its shared-memory op only for small all-reduces of inference. Without a cache it compiles for a
    # minute, and a build that is killed leaves a lock on which every later run waits forever.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def _use_the_group() -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


if __name__ == "__main__":
    main(_import_deepspeed, _use_the_group)
