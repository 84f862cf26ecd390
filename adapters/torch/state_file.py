# SPDX-License-Identifier: Apache-2.0
"""Keeps masters and moments of an optimizer's parameters in a file that has two steps (docs/optimizer.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..._library import load
from ...errors import External, InvalidArgument
from .optimizer_step import Entry, OptimizerStep

_STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class FileOptions(NamedTuple):
    """Has durable: each step is on the disk before it ends. resume: continue from an existing file; else an existing
    file is an error. step: which of the file's two steps to load; None: the later one. rank, world_size: of the file.
    comm: of the ranks that step together, which create or open their files together.
    """

    durable: bool = False
    resume: bool = False
    step: int | None = None
    rank: int = 0
    world_size: int = 1
    comm: Any = None


class StateFile:
    """Owns the state file of one optimizer. The constructor creates it or opens it. When an existing file is resumed,
    the parameters are overwritten by the file's masters.

    A process can open a file once, and its forked children cannot use it. Each rank has its own path. With a comm the
    constructor is collective.
    """

    def __init__(self, path: str, groups: Sequence[Mapping[str, Any]], options: FileOptions) -> None:
        self.path = os.fspath(path)
        self._library = load()
        self._options = options
        self.handle: Any = None
        if options.step is not None and not options.resume:
            raise InvalidArgument(
                "sluice.optim: step selects where an existing file continues: pass resume=True with it"
            )
        is_there = os.path.exists(self.path)
        if options.resume and (is_there or options.step is not None):
            described = self._described(groups, {})
            self.handle = self._owned(described.open_file(self._config(options.step, options.comm)))
            described.load_file(self.handle)
            return
        try:
            self.handle = self._owned(self._described(groups, {}).create_file(self._config(0, options.comm)))
        except External as error:
            if not is_there:
                raise
            raise InvalidArgument(
                f"sluice.optim: state_file {self.path} exists: resume=True continues its steps and replaces the "
                "parameters with its masters; for a new run remove it, or give another path"
            ) from error

    @property
    def step(self) -> int:
        """Returns the number of steps up to the last one in the file."""
        info = self._library.new("optimizer_file_info")
        self._library.check(self._library.lib.sluice_optimizer_file_info(self.handle, info))
        return info.step

    def states(self, groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Copies moments, and masters of 16-bit parameters, in f32, for a state dict. Parameters are not changed. If
        other code has written a parameter since the last step, its master is the parameter's new value."""
        found = {}
        for param in (param for group in groups for param in group["params"]):
            names = _STATES if param.dtype == torch.float32 else (*_STATES, MASTER)
            found[param] = {name: torch.empty_like(param, dtype=torch.float32) for name in names}
        self._described(groups, found, is_filled=False).load_file(self.handle)
        for param, states in found.items():
            if MASTER in states:
                value = param.detach()
                is_master = states[MASTER].to(param.dtype) == value
                states[MASTER] = torch.where(is_master, states[MASTER], value.to(torch.float32))
        return found

    def replace(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]], step: int
    ) -> None:
        """Replaces the file by a new one, filled from these states and the parameters, once that is complete."""
        config = self._config(step, None)
        config.replaces = True
        new = self._owned(self._described(groups, states).create_file(config))  # if it fails the old one stays
        self.close()
        self.handle = new

    def close(self) -> None:
        """Closes the file, which stays on the disk."""
        if self.handle is not None:
            self._library.ffi.release(self.handle)
            self.handle = None

    def _described(
        self,
        groups: Sequence[Mapping[str, Any]],
        states: Mapping[torch.Tensor, Mapping[str, Any]],
        is_filled: bool = True,
    ) -> OptimizerStep:
        described = OptimizerStep(None)
        for group in groups:
            entries = []
            for param in group["params"]:
                state = states.get(param, {})
                kept = (state.get(name) for name in (*_STATES, MASTER))
                entries.append(Entry(1, param, None, *kept, is_filled=is_filled))
            described.add_group(group, entries)
        return described

    def _config(self, step: int | None, comm: Any) -> Any:
        config = self._library.new("optimizer_file_config")
        self._path = self._library.ffi.new("char[]", os.fsencode(self.path))  # the config points to it
        config.path, config.step = self._path, -1 if step is None else step
        config.durable = self._options.durable
        config.rank, config.world_size = self._options.rank, self._options.world_size
        if comm is not None:
            config.comm = comm
        return config

    def _owned(self, handle: Any) -> Any:
        return self._library.ffi.gc(handle, self._library.lib.sluice_optimizer_file_close)


def check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuses parameters without a gradient, because the file has one step for all of its parameters."""
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            if param.grad is None:
                raise InvalidArgument(
                    f"sluice.optim: parameter {index} of group {number} has no gradient; with a state_file each "
                    "parameter needs one in every step: leave frozen parameters out"
                )
