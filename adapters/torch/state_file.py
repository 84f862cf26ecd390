"""Masters and moments of an optimizer's parameters in a file that holds two steps (docs/optimizer.md)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._library import load
from ...errors import InvalidArgument
from .optimizer_step import Entry, OptimizerStep

_STATES = ("exp_avg", "exp_avg_sq")
MASTER = "master"


class StateFile:
    """Of one optimizer. Made or opened at once: parameters of a file that is there become its masters.

    A process has a file open once; over ranks each rank has a path of its own.
    """

    def __init__(self, path: str, groups: Sequence[Mapping[str, Any]]) -> None:
        self.path = os.fspath(path)
        self._library = load()
        self._handle: Any = None
        if os.path.exists(self.path):
            self._open()
            self._described(groups, {}).load_file(self._handle)
        else:
            self._create(groups, {}, 0)

    @property
    def handle(self) -> Any:
        """What a step takes."""
        return self._handle

    @property
    def step(self) -> int:
        """The number of steps that it has behind it."""
        return self._info().step

    def states(self, groups: Sequence[Mapping[str, Any]]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """Copies, for a state dict: moments, and the masters of 16-bit parameters, in f32."""
        found = {}
        for param in _params(groups):
            names = _STATES if param.dtype == torch.float32 else (*_STATES, MASTER)
            found[param] = {name: torch.empty_like(param, dtype=torch.float32) for name in names}
        self._described(groups, found).load_file(self._handle)
        return found

    def replace(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]], step: int
    ) -> None:
        """What is there goes once a new file stands beside it, filled from these states and the parameters."""
        path, self.path = self.path, f"{self.path}.new"
        try:
            self._create(groups, states, step)  # lets go of the old one
            self.close()
            os.replace(self.path, path)
        finally:
            self.path = path
        self._open()

    def close(self) -> None:
        """The file stays on the disk."""
        if self._handle is not None:
            self._library.ffi.release(self._handle)
            self._handle = None

    def _described(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> OptimizerStep:
        described = OptimizerStep(None)
        for group in groups:
            entries = []
            for param in group["params"]:
                state = states.get(param, {})
                entries.append(Entry(1, param, None, *(state.get(name) for name in (*_STATES, MASTER))))
            described.add_group(group, entries)
        return described

    def _config(self, step: int) -> tuple[Any, Any]:
        config, path = (
            self._library.new("optimizer_file_config"),
            self._library.ffi.new("char[]", os.fsencode(self.path)),
        )
        config.path, config.step = path, step
        return config, path  # which the config borrows

    def _create(
        self, groups: Sequence[Mapping[str, Any]], states: Mapping[torch.Tensor, Mapping[str, Any]], step: int
    ) -> None:
        config, _kept = self._config(step)
        self._hold(self._described(groups, states).create_file(config))

    def _open(self) -> None:
        config, _kept = self._config(-1)
        out = self._library.ffi.new("sluice_optimizer_file_t **")
        self._library.check(self._library.lib.sluice_optimizer_file_open(config, out))
        self._hold(out[0])

    def _hold(self, handle: Any) -> None:
        self.close()
        self._handle = self._library.ffi.gc(handle, self._library.lib.sluice_optimizer_file_close)

    def _info(self) -> Any:
        info = self._library.new("optimizer_file_info")
        self._library.check(self._library.lib.sluice_optimizer_file_info(self._handle, info))
        return info


def check_gradients(groups: Sequence[Mapping[str, Any]]) -> None:
    """The file's step is one for all of its parameters."""
    for number, group in enumerate(groups):
        for index, param in enumerate(group["params"]):
            if param.grad is None:
                raise InvalidArgument(
                    f"sluice.optim: parameter {index} of group {number} has no gradient; with a state_file all have "
                    "one in every step: leave frozen ones out"
                )


def _params(groups: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]
