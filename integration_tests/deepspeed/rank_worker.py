# SPDX-License-Identifier: Apache-2.0
"""One rank of `rank_harness.Ranks`: joins the group, then runs its commands, line by line.

Arguments: the descriptor of the replies, the socket of rank 0's store, and the name of the host."""

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


def _main(prepare: Callable[[], Any], joined: Callable[[], Any]) -> None:
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
        prepare()
        import torch

        torch.set_num_threads(1)
        _seed_the_cpu_alone()
        _join(int(sys.argv[2]))
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


def _import_megatron() -> None:
    """Imports the shim, and makes Megatron fork the process that returns a checkpoint's results; a spawned one would
    import torch again for each save. If writers are forks, as here, later releases also support a forked one
    (`mp_mode`)."""
    importlib.import_module("cpu_shim")
    from torch import multiprocessing

    context_of = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context_of("fork" if method == "spawn" else method)


if __name__ == "__main__":
    _prepare = {"deepspeed": _import_deepspeed, "megatron": _import_megatron}.get(sys.argv[3], lambda: None)
    _main(_prepare, _use_the_group if sys.argv[3] == "deepspeed" else lambda: None)
