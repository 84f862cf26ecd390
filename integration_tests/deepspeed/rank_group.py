# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks of `rank_harness.Ranks` into a process group."""

import os
from collections.abc import Iterable
from datetime import timedelta


def join(door: int) -> None:
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


def seed_the_cpu_alone() -> None:
    """Makes torch.manual_seed skip other devices. For each kind of device that is not initialized, torch.manual_seed
    records a stack trace, which takes longer than the layers of a pipeline that seeds its layers."""
    import torch

    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None


def say(what: str) -> None:
    """Announces an event of this rank to `hear`. Ranks are ordered this way and not by sleeps."""
    import torch.distributed as dist

    dist.distributed_c10d._get_default_store().set(f"test/{what}/{dist.get_rank()}", "")


def hear(what: str, ranks: Iterable[int]) -> None:
    """Waits until all these ranks have announced the event."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.wait([f"test/{what}/{rank}" for rank in ranks], timedelta(seconds=120))
