# SPDX-License-Identifier: Apache-2.0
"""Implements torch's Adam and AdamW by the library: replacements for `torch.optim` over parameters on a CPU.

State, state dicts, parameter groups, hooks and closures are torch's own, so that either loads the other's checkpoints.
The differences: an infinite or NaN gradient skips the whole step, with a warning and `skipped_steps`, moments of 16-bit
parameters are f32, and results are the same bits for every number of threads.

With a `process_group` a step also averages the gradients over its ranks, bucket by bucket during the updates (data
parallel without a wrapper around the model).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...errors import InvalidArgument
from .optimizer_ranks import StepRanks, found_on_any_rank, groups_of_parts, ranks_of
from .optimizer_step import Entry, OptimizerStep, new_handle
from .state_file import MASTER, FileOptions, StateFile, check_gradients

_STATE = ("exp_avg", "exp_avg_sq")
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


class Adam(torch.optim.Adam):
    """Updates like `torch.optim.Adam`; `foreach` and `fused` have no effect.

    check_finite: False if gradients are finite in any case, which saves one read of them. A GradScaler checks them
    itself.

    exact: True: each update is within 2 ulp of f64 arithmetic. False: each operation is rounded once, as in torch,
    which takes less time. Both give the same bits on every processor.
    process_group: ranks that each have a copy of the parameters, equal when training begins, and gradients of their
    own part of the batch. Steps are collective over it and update by the mean gradient. An infinite or NaN gradient on
    any rank skips the step on all. In a step all ranks have gradients for the same parameters. A parameter group may
    have its own `process_group`, a subset of these ranks, for experts that are not on all of them. Its gradients are
    summed over the subset, and divided by the number of all ranks.
    max_norm: clips by the norm of the (mean) gradients over all groups, as torch's clip_grad_norm_ does; 0: no
    clipping. With a process_group clip here, because before a step no rank has the mean.
    `norm` is that norm in the last step that clipped, and with exact=True in the last that checked gradients.
    state_file: path of a file for moments, and masters of 16-bit parameters, which are then not in memory. Each rank
    has its own path. A step starts from the parameters' current values, even if other code has written them. All
    parameters have a gradient in every step, and no group is added later. `state_dict` has copies of the file's
    contents, so that checkpoints do not depend on the file.
    resume: True: continue from an existing file (the parameters are overwritten by its masters at once), or create
    one; False: an existing file is an error. The file has to be of this model, rank and world size. step: which of the
    file's two steps to load; None: the later one. With a process_group all ranks continue from the last step that all
    have, and the constructor is collective. durable: each step is on the disk before it ends, and survives a crash of
    the machine; otherwise it survives a crash of the process.

    Refused by name: amsgrad, capturable, differentiable, sparse gradients, dtypes other than f32, bf16 and f16, and
    parameters that are not on a CPU.

    Threads: as torch's. Errors: InvalidArgument, a ValueError, naming what is refused; nothing was changed.
    """

    # A GradScaler leaves unscaling and skipping to the step, which then reads gradients once and not twice.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        *args: Any,
        check_finite: bool = True,
        exact: bool = False,
        process_group: dist.ProcessGroup | None = None,
        max_norm: float = 0.0,
        state_file: str | None = None,
        resume: bool = False,
        durable: bool = False,
        step: int | None = None,
        **options: Any,
    ) -> None:
        self._ranks, self._file = StepRanks(ranks_of(process_group)), None
        if state_file is None and (resume or durable or step is not None):
            raise InvalidArgument(
                f"sluice.optim.{type(self).__name__}: resume, durable and step need a state_file: give its path"
            )
        super().__init__(params, *args, **options)
        self._handle, self.exact = new_handle(exact), exact
        self.check_finite = check_finite
        self.max_norm = max_norm
        self.skipped_steps = 0
        self.norm = 0.0
        if state_file is not None:
            for group in self.param_groups:
                for param in group["params"]:
                    self._check(param)
            comm = self._ranks.open(len(self.param_groups))[0]
            ranks = FileOptions(durable, resume, step, *self._ranks.place(), comm)
            self._file = StateFile(state_file, self.param_groups, ranks)
            self._set_steps(self._file.step)

    def _set_steps(self, number: int) -> None:
        """Sets the step of all parameters to the file's, which has one number for all of them."""
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param] = {"step": torch.tensor(float(number))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        lasting = {"skipped_steps": 0, "check_finite": True, "exact": False, "max_norm": 0.0, "norm": 0.0}
        for name, value in {**lasting, "_ranks": StepRanks(None), "_file": None}.items():
            self.__dict__.setdefault(name, value)
        self._handle = new_handle(self.exact)

    def __getstate__(self) -> dict[str, Any]:
        if self._file is not None:
            raise InvalidArgument(
                f"sluice.optim.{type(self).__name__}: one with a state_file cannot be copied: use state_dict"
            )
        own = ("skipped_steps", "check_finite", "exact", "max_norm", "norm", "_ranks")
        return super().__getstate__() | {name: getattr(self, name) for name in own}

    @property
    def over_ranks(self) -> bool:
        """Returns whether steps are collective."""
        return self._ranks.of_step is not None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name in _UNSUPPORTED:
            if param_group.get(name, self.defaults[name]):
                raise InvalidArgument(f"sluice.optim.{type(self).__name__} does not support {name}: leave it out")
        if self._file is not None:
            raise InvalidArgument(
                f"sluice.optim.{type(self).__name__}: parameter groups cannot be added with a state_file"
            )
        # It is not kept in the group: state dicts have all entries of groups, and a process group cannot be saved.
        param_group = dict(param_group)
        ranks = ranks_of(param_group.pop("process_group", None))
        self._ranks.check(ranks, f"sluice.optim.{type(self).__name__}")
        super().add_param_group(param_group)
        self._ranks.of_groups.append(ranks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state dict as torch does, but moments stay f32 for any dtype. If it fails nothing was changed."""
        before = self.state, self.param_groups
        try:
            self._load(state_dict)
        except BaseException:
            self.state, self.param_groups = before
            raise

    def _load(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params):  # torch has refused states of other sizes
            for name in _STATE:
                if name in state_dict["state"].get(index, {}):
                    value = state_dict["state"][index][name]
                    self.state[param][name] = torch.empty_like(param, dtype=torch.float32).copy_(value)
            if self._file is not None and MASTER in state_dict["state"].get(index, {}):
                value = state_dict["state"][index][MASTER]
                self.state[param][MASTER] = torch.empty_like(param, dtype=torch.float32).copy_(value)
        if self._file is not None:
            self._fill_file(params)

    def _fill_file(self, params: list[torch.Tensor]) -> None:
        """Writes the loaded states to the file, and drops them from memory."""
        steps = {int(self.state[param].get("step", 0)) for param in params}
        if len(steps) != 1:
            raise InvalidArgument(
                f"sluice.optim.{type(self).__name__}: with a state_file all parameters are at one step, not "
                f"{sorted(steps)}"
            )
        self._file.replace(self.param_groups, self.state, steps.pop())
        self._set_steps(self._file.step)

    def state_dict(self) -> dict[str, Any]:
        """Returns torch's state dict; with a state_file it has copies of the file's states, `master` included."""
        if self._file is None:
            return super().state_dict()
        held = {param: dict(state) for param, state in self.state.items()}
        for param, states in self._file.states(self.param_groups).items():
            self.state[param] = {**self.state[param], **states}
        try:
            return super().state_dict()
        finally:
            self.state.update(held)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        looks = self.check_finite and found_inf is None
        if self.over_ranks:
            self._ranks.check_scaler(self, found_inf)
            # A scaler has checked this rank's gradients alone; all ranks check theirs in the step.
            found_inf, looks = None, self.check_finite or found_inf is not None
        if found_inf is not None and found_inf.item():
            return loss  # the scaler reports and counts it
        if self._file is not None:
            check_gradients(self.param_groups)
        comm, comms, world_size = self._ranks.open(len(self.param_groups))
        step, states = OptimizerStep(self._handle), []
        for group, comm_of_group in zip(self.param_groups, comms):
            entries = []
            for param in group["params"]:
                if param.grad is not None:
                    self._check(param)
                    states.append(state := self._state_of(param))
                    moments = (state.get(name) for name in _STATE)
                    entries.append(Entry(int(state["step"]) + 1, param, param.grad, *moments))
            step.add_group(group, entries, comm_of_group)
        loss_scale = world_size * (1.0 if grad_scale is None else float(grad_scale))
        file = None if self._file is None else self._file.handle
        parts = groups_of_parts(self.param_groups) if looks and not self.over_ranks else []
        is_taken = not (parts and found_on_any_rank(self.param_groups, parts)) and step.run(
            loss_scale, looks and not parts, self.max_norm, comm, file
        )
        self.norm = step.norm
        if is_taken:
            if states:
                torch._foreach_add_([state["step"] for state in states], 1)
        else:
            self.skipped_steps += 1
            if self.skipped_steps == 1:
                warnings.warn(
                    f"sluice.optim.{type(self).__name__}: a gradient is infinite or NaN: the step was skipped, "
                    "nothing was changed (logged once; skipped_steps counts all)",
                    stacklevel=2,
                )
        return loss

    def _check(self, param: torch.Tensor) -> None:
        name, grad = f"sluice.optim.{type(self).__name__}", param.grad
        if param.device.type != "cpu":
            raise InvalidArgument(
                f"{name}: a parameter is on {param.device}: parameters must be on a CPU; use torch.optim for others"
            )
        if grad is not None and grad.is_sparse:
            raise InvalidArgument(f"{name} does not support sparse gradients: use torch.optim.SparseAdam")
        if self.max_norm and any(placement.is_shard() for placement in getattr(param, "placements", ())):
            raise InvalidArgument(
                f"{name}: max_norm is set, but a parameter is sharded over ranks, and each would clip by the norm of "
                "its own shard: use torch.nn.utils.clip_grad_norm_"
            )
        if param.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise InvalidArgument(f"{name}: a parameter is {param.dtype}: use float32, bfloat16 or float16")

    def _state_of(self, param: torch.Tensor) -> dict[str, Any]:
        state = self.state[param]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in _STATE:
                state[name] = torch.zeros_like(param, dtype=torch.float32)
        return state


class AdamW(Adam, torch.optim.AdamW):
    """Updates like `torch.optim.AdamW`: Adam with decoupled weight decay, 0.01 by default. Otherwise like `Adam`."""


class GradScaler(torch.amp.GradScaler):
    """Scales like `torch.amp.GradScaler`. For a `sluice.optim` optimizer with a process_group the step itself checks
    whether gradients and their sums are finite, so that all ranks skip together and have the same scale.

    With such an optimizer `unscale_` raises InvalidArgument: before the step a rank has only its own gradients. Clip
    by the optimizer's `max_norm`.
    """

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if self.is_enabled() and getattr(optimizer, "over_ranks", False):
            raise InvalidArgument(
                f"unscale_: gradients of sluice.optim.{type(optimizer).__name__} are summed over ranks within its "
                "step; clip by its max_norm"
            )
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not self.is_enabled() or not getattr(optimizer, "over_ranks", False):
            return super().step(optimizer, *args, **kwargs)
        skipped = optimizer.skipped_steps
        optimizer.scaler_asks_the_step = True
        try:
            result = super().step(optimizer, *args, **kwargs)
        finally:
            del optimizer.scaler_asks_the_step
        for found in self._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
            found.fill_(float(optimizer.skipped_steps > skipped))
        return result

    def _check_inf_per_device(self, optimizer: torch.optim.Optimizer) -> Any:
        """Checks nothing for a step over ranks; `step` fills in the result of the optimizer's step."""
        if not getattr(optimizer, "over_ranks", False):
            return super()._check_inf_per_device(optimizer)
        found = {self._scale.device: torch.zeros((), device=self._scale.device)}
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = found
        return found
