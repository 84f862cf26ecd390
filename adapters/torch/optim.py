"""Adam and AdamW of torch, computed by the library: drop-in for `torch.optim.AdamW` over parameters on a CPU.

State, state dicts, parameter groups, hooks and closures are torch's own, so checkpoints go both ways. What differs: a
step is all or nothing (a gradient that is infinite or no number skips it, told by a warning and `skipped_steps`),
moments of 16-bit parameters are f32, and results are the same bits for every number of threads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from ...errors import InvalidArgument
from .optimizer_step import Entry, OptimizerStep, new_handle

_STATE = ("exp_avg", "exp_avg_sq")
_UNSUPPORTED = ("amsgrad", "capturable", "differentiable")


class Adam(torch.optim.Adam):
    """As `torch.optim.Adam`; `foreach` and `fused` change nothing.

    check_finite: False where the caller knows that gradients are finite, which spares one reading of them. A
    GradScaler has looked itself.

    Refused by name: amsgrad, capturable, differentiable, sparse gradients, dtypes other than f32, bf16 and f16, and
    parameters that are not on a CPU.

    Threads: as torch's. Errors: InvalidArgument, a ValueError, naming what is refused; nothing was changed.
    """

    # A GradScaler leaves scale and verdict to the step, which then reads gradients once in place of twice.
    _step_supports_amp_scaling = True

    def __init__(self, params: Any, *args: Any, check_finite: bool = True, **options: Any) -> None:
        super().__init__(params, *args, **options)
        self._handle = new_handle()
        self.check_finite = check_finite
        self.skipped_steps = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._handle = new_handle()
        self.__dict__.setdefault("skipped_steps", 0)
        self.__dict__.setdefault("check_finite", True)

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"skipped_steps": self.skipped_steps, "check_finite": self.check_finite}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        for name in _UNSUPPORTED:
            if param_group.get(name, self.defaults[name]):
                raise InvalidArgument(f"sluice.optim.{type(self).__name__} does not do {name}: leave it out")
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but moments stay f32 whatever dtype the parameters have."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for index, param in zip(saved, params):  # torch has refused states of other sizes
            for name in _STATE:
                if name in state_dict["state"].get(index, {}):
                    value = state_dict["state"][index][name]
                    self.state[param][name] = torch.empty_like(param, dtype=torch.float32).copy_(value)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, grad_scale = getattr(self, "found_inf", None), getattr(self, "grad_scale", None)
        if found_inf is not None and found_inf.item():
            return loss  # the scaler tells and counts it
        step, states = OptimizerStep(self._handle), []
        for group in self.param_groups:
            entries = []
            for param in group["params"]:
                if param.grad is not None:
                    self._check(param)
                    states.append(state := self._state_of(param))
                    moments = (state[name] for name in _STATE)
                    entries.append(Entry(int(state["step"]) + 1, param, param.grad, *moments))
            step.add_group(group, entries)
        looks = self.check_finite and found_inf is None
        if step.run(1.0 if grad_scale is None else float(grad_scale), check_finite=looks):
            for state in states:
                state["step"] += 1
        else:
            self.skipped_steps += 1
            if self.skipped_steps == 1:
                warnings.warn(
                    f"sluice.optim.{type(self).__name__}: a gradient is infinite or no number: the step was skipped, "
                    "nothing was changed (told once; skipped_steps counts on)",
                    stacklevel=2,
                )
        return loss

    def _check(self, param: torch.Tensor) -> None:
        name, grad = f"sluice.optim.{type(self).__name__}", param.grad
        if param.device.type != "cpu":
            raise InvalidArgument(f"{name}: a parameter is on {param.device}: it works on a CPU, use torch.optim there")
        if grad is not None and grad.is_sparse:
            raise InvalidArgument(f"{name} does not do sparse gradients: use torch.optim.SparseAdam")
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
    """As `torch.optim.AdamW`: Adam with decoupled weight decay, 0.01 by default. The rest as `Adam` here."""
