# SPDX-License-Identifier: Apache-2.0
"""Rank-side: makes one rank of a split model deviate from the other, and returns the errors on both."""

import contextlib
import os
import signal
import time
from typing import Any

import peft
import sluice
import torch
import torch.distributed as dist
from sluice.errors import SluiceError
from test_tf_adapters import STACKS
from tf_ep_jobs import split
from tf_models import experts_of
from torch.autograd import forward_ad


def _experts(path: str, implementation: str = "sluice") -> Any:
    """Returns the first layer's experts of a model whose experts are split over the ranks."""
    return experts_of(split(path, {"fsdp_size": dist.get_world_size()}, implementation))[0]


def _call(experts: Any, tokens: torch.Tensor | None = None, change: int | None = None) -> torch.Tensor:
    """Calls experts with three rows. change: an id instead of one of theirs."""
    ids = torch.arange(6).remainder(experts.num_experts * dist.get_world_size()).view(3, 2)
    if change is not None:
        ids[1, 1] = change
    return experts(torch.randn(3, experts.config.hidden_size) if tokens is None else tokens, ids, torch.ones(3, 2))


def deviates(path: str, case: str) -> list[str]:
    """Calls experts three times, in the second of which rank 1 deviates; "dtype": in the first. Returns the errors."""
    # Callbacks compute in the dtype of the rows, so each rank decides what it rejects.
    experts = _experts(path, "eager" if case == "dtype" else "sluice")
    said = []
    for number in range(3):
        is_bad = dist.get_rank() == 1 and number == (0 if case == "dtype" else 1)
        tokens = torch.randn(3, 32, dtype=torch.float64) if is_bad and case == "dtype" else None
        change = int(case.removeprefix("id ")) if is_bad and case.startswith("id ") else None
        if case == "config":
            experts.config.sluice = {"chnks": 2} if is_bad else None
        if case == "options":
            sluice.configure(**({"chunks": 2 + dist.get_rank()} if number == 1 else {}))
        try:
            with forward_ad.dual_level() if is_bad and case == "forward mode" else contextlib.nullcontext():
                said.append("" if _call(experts, tokens, change).isfinite().all() else "not finite")
        except SluiceError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def dies_in_backward(path: str) -> dict[str, Any]:
    """Kills rank 1 before the backward of its experts, and returns rank 0's error, and how soon it came. Only the
    experts run: a model's own collectives would fail first, with gloo's message."""
    output = _call(_experts(path))

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == 1:
        output.register_hook(die)
    began = time.monotonic()
    try:
        output.sum().backward()
    except SluiceError as error:
        return {"said": f"{type(error).__name__}: {error}", "s": time.monotonic() - began}
    return {"said": "", "s": 0.0}


class _Twice(torch.nn.Module):
    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


class _OtherWrapper(torch.nn.Module):
    """A wrapper that PEFT may have in the future."""

    __module__ = "peft.tuners.other"
    parameter_name = "gate_up_proj"

    def __init__(self, experts: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer = experts


def adapters(path: str, targets: str) -> dict[str, Any]:
    """Adds adapters to a split model, and returns the error when they are added, or that of a step."""
    model = split(path, {"fsdp_size": dist.get_world_size()}, "grouped_mm" if targets == "other experts" else "sluice")
    began = False
    try:
        if targets == "wrapper":
            _OtherWrapper(experts_of(model)[0])
        elif targets == "parametrization":
            torch.nn.utils.parametrize.register_parametrization(experts_of(model)[0], "gate_up_proj", _Twice())
        else:
            is_differing = targets == "differing r"
            rank, stacks = 2 + is_differing * dist.get_rank(), list(STACKS if is_differing else STACKS[:1])
            model = peft.get_peft_model(model, peft.LoraConfig(r=rank, target_modules=[], target_parameters=stacks))
        began = True
        model(input_ids=torch.arange(12).view(2, 6))
        return {"said": "", "began": began}
    except SluiceError as error:
        return {"said": f"{type(error).__name__}: {error}", "began": began}
