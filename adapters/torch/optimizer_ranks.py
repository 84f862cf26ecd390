# SPDX-License-Identifier: Apache-2.0
"""Finds the ranks of an optimizer's steps, the ranks of each parameter group, and their communicators."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..._library import load
from ...errors import InvalidArgument
from .group import EpGroup
from .placement import Placement

Ranks = tuple[int, ...]


def ranks_of(process_group: dist.ProcessGroup | None) -> Ranks | None:
    """Returns the group's global ranks, ascending; None: no group was given."""
    if process_group is None:
        return None
    if not dist.is_initialized():
        raise InvalidArgument("process_group: torch.distributed must be initialised first")
    return tuple(sorted(dist.get_process_group_ranks(process_group)))


class StepRanks:
    """Has of_step: the ranks that step together, None: this one alone; of_groups: the ranks of each parameter group.

    The object has no process groups, so that it can be copied and saved with its optimizer.
    """

    def __init__(self, of_step: Ranks | None) -> None:
        self.of_step = of_step
        self.of_groups: list[Ranks | None] = []
        self._opened: dict[Ranks, EpGroup] = {}
        self._alone: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"of_step": self.of_step, "of_groups": list(self.of_groups), "_opened": {}, "_alone": None}

    def place(self) -> tuple[int, int]:
        """Returns this rank's index among the ranks that step together, and their number; by default of the job."""
        if not dist.is_initialized():
            return 0, 1
        if self.of_step is None:
            return dist.get_rank(), dist.get_world_size()
        return self.of_step.index(dist.get_rank()), len(self.of_step)

    def check(self, ranks: Ranks | None, name: str) -> None:
        """Refuses a parameter group's ranks that are not a subset of the step's."""
        if ranks is None:
            return
        if self.of_step is None:
            raise InvalidArgument(
                f"{name}: a parameter group has a process_group, but the optimizer has none: give the optimizer one"
            )
        if not set(ranks) <= set(self.of_step):
            raise InvalidArgument(
                f"{name}: a parameter group's process_group has ranks {list(ranks)}, which are not all among those of "
                f"the optimizer, {list(self.of_step)}"
            )

    def check_scaler(self, optimizer: Any, found_inf: Any) -> None:
        """Refuses a GradScaler that decides separately on each rank, as the others would wait for a rank that skips."""
        if found_inf is not None and not getattr(optimizer, "scaler_asks_the_step", False):
            raise InvalidArgument(
                f"sluice.optim.{type(optimizer).__name__} with a process_group: torch's GradScaler checks the "
                "gradients of one rank only; use sluice.optim.GradScaler"
            )

    def open(self, num_groups: int) -> tuple[Any, list[Any], int]:
        """Returns the communicators of a step (None: one rank) and of each parameter group (None: the step's), and the
        number of ranks.

        The first call is collective over the step's ranks, in the order of the groups.
        """
        if self.of_step is None or len(self.of_step) == 1:
            return None, [None] * num_groups, 1
        comm = self._comm_of(self.of_step)
        comms = [None if ranks in (None, self.of_step) else self._comm_of(ranks) for ranks in self.of_groups]
        return comm, comms, len(self.of_step)

    def _comm_of(self, ranks: Ranks) -> Any:
        """Returns a group's communicator for this optimizer only: a step may run at the same time as layers' passes."""
        if len(ranks) == 1:
            return self._comm_of_one()
        group = self._opened.get(ranks)
        if group is None or not group.alive:
            group = self._opened[ranks] = EpGroup.unshared(ranks)
            weakref.finalize(self, group.close)
        return group.comm_on(Placement())

    def _comm_of_one(self) -> Any:
        """Returns the communicator for parameters that no other rank has: NULL would mean all ranks of the step."""
        if self._alone is None:
            library = load()
            group, comm = library.ffi.new("sluice_local_group_t **"), library.ffi.new("sluice_comm_t **")
            library.check(library.lib.sluice_local_group_create(1, group))
            config = library.new("comm_config")
            config.rank, config.world_size = 0, 1
            try:
                library.check(library.lib.sluice_comm_create_local(group[0], config, comm))
            except BaseException:
                library.lib.sluice_local_group_destroy(group[0])
                raise
            self._alone = comm[0]
            weakref.finalize(self, _close_alone, comm[0], group[0])
        return self._alone


def groups_of_parts(param_groups: Sequence[dict[str, Any]]) -> list[Any]:
    """Returns the process groups over which parameters are sharded, once for each list of ranks, in the same order on
    all ranks. A rank may know fewer device meshes than the others, if its own shards are frozen and were not given. A
    mesh over the whole world is therefore replaced by the world's group."""
    meshes: dict[Ranks, Any] = {}
    for group in param_groups:
        for param in group["params"]:
            if any(placement.is_shard() for placement in getattr(param, "placements", ())):
                meshes.setdefault(tuple(sorted(param.device_mesh.mesh.flatten().tolist())), param.device_mesh)
    groups: list[Any] = []
    for ranks in sorted(meshes, key=lambda ranks: (len(ranks), ranks)):
        is_world = len(ranks) == dist.get_world_size()
        groups.extend([dist.group.WORLD] if is_world else meshes[ranks].get_all_groups())
    return groups


def found_on_any_rank(param_groups: Sequence[dict[str, Any]], groups: Sequence[Any]) -> bool:
    """Returns whether any gradient is infinite or NaN on any rank of the groups. Collective over them: a rank that
    checked its own shard alone would skip a step that the others take."""
    params = (param for group in param_groups for param in group["params"] if param.grad is not None)
    grads = (getattr(param.grad, "_local_tensor", param.grad) for param in params)
    found = torch.tensor(float(any(not bool(torch.isfinite(grad).all()) for grad in grads)))
    for group in groups:
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return bool(found.item())


def _close_alone(comm: Any, group: Any) -> None:
    lib = load().lib
    lib.sluice_comm_destroy(comm)
    lib.sluice_local_group_destroy(group)
