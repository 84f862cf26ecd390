# SPDX-License-Identifier: Apache-2.0
"""Joins the ranks of `rank_harness.Ranks` into a process group."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta


def join(door: int) -> None:
    """Rank 0's store listens at `door`, a socket that the harness opened, so that no other program takes the port."""
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
    """torch.manual_seed notes down the whole stack for every kind of device that is not there, in case it comes: of a
    pipeline that seeds its layers that takes longer than the layers."""
    import torch

    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None


def say(what: str) -> None:
    """Something is so on this rank, from now on: the order between ranks, which no sleep can stand for."""
    import torch.distributed as dist

    dist.distributed_c10d._get_default_store().set(f"test/{what}/{dist.get_rank()}", "")


def hear(what: str, ranks: Iterable[int]) -> None:
    """Waits until all these ranks have said so."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    store.wait([f"test/{what}/{rank}" for rank in ranks], timedelta(seconds=120))


def make_groups(count: int) -> None:
    """More groups of all ranks, which stay."""
    import torch.distributed as dist

    for _ in range(count):
        dist.new_group()
