# SPDX-License-Identifier: Apache-2.0
"""Rank-side: makes one rank of a split model deviate from the other, and returns the errors on both."""

import os
import signal
import time
from typing import Any

import sluice
import torch
import torch.distributed as dist
from sluice.errors import SluiceError
from tf_ep_jobs import split
from tf_models import experts_of


def _module(path: str, **options: Any) -> Any:
    """Returns the first layer's experts of a model whose experts are split over the ranks."""
    sluice.configure(**options)
    return experts_of(split(path, {"fsdp_size": dist.get_world_size()}))[0]


def _call(experts: Any) -> torch.Tensor:
    total = experts.num_experts * dist.get_world_size()
    ids = torch.arange(6).remainder(total).view(3, 2)
    return experts(torch.randn(3, experts.config.hidden_size), ids, torch.ones(3, 2))


def _said(experts: Any) -> str:
    try:
        _call(experts)
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def options_differ(path: str) -> dict[str, Any]:
    """Gives each rank another number of chunks, and then both the same."""
    experts = _module(path, chunks=2 + dist.get_rank())
    said = _said(experts)
    sluice.configure(chunks=2)
    output = _call(experts)
    sluice.configure()
    return {"said": said, "finite": bool(output.isfinite().all())}


def does_not_divide(path: str) -> str:
    """Splits a model, and returns transformers' error."""
    try:
        _module(path)
    except ValueError as error:
        return str(error)
    return ""


def ids_out_of_range(path: str) -> list[str]:
    """Gives rank 1 an invalid id; then both continue."""
    experts = _module(path)
    total, said = experts.num_experts * dist.get_world_size(), []
    for bad in (-1, total, 0):
        ids = torch.zeros(3, 2, dtype=torch.int64)
        ids[1, 1] = bad if dist.get_rank() == 1 else 1
        try:
            experts(torch.randn(3, experts.config.hidden_size), ids, torch.ones(3, 2))
            said.append("")
        except SluiceError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def one_rank_skips(path: str) -> str:
    """Omits the second call on rank 1."""
    experts = _module(path, timeout=5)
    _call(experts)
    return "" if dist.get_rank() == 1 else _said(experts)


def dies_in_backward(path: str) -> dict[str, Any]:
    """Kills rank 1 before the backward of its experts, and returns rank 0's error, and how soon it came. Only the
    experts run: a model's own collectives would fail first, with gloo's message."""
    output = _call(_module(path))

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
    """Adds adapters to a split model, and returns the error when they are added or first run, or the loss of a step."""
    import peft
    from test_tf_adapters import STACKS

    experts = "grouped_mm" if targets == "other experts" else "sluice"
    model = split(path, {"fsdp_size": dist.get_world_size()}, experts)
    attention = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    began = False
    try:
        if targets == "attention":
            model = peft.get_peft_model(model, attention)
        elif targets == "wrapper":
            _OtherWrapper(experts_of(model)[0])
        elif targets == "other experts":
            stacked = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
            model = peft.get_peft_model(model, stacked)
        elif targets == "differing r":
            own = peft.LoraConfig(r=2 + dist.get_rank(), target_modules=[], target_parameters=list(STACKS))
            model = peft.get_peft_model(model, own)
        else:
            torch.nn.utils.parametrize.register_parametrization(experts_of(model)[0], "gate_up_proj", _Twice())
        began = True
        ids = torch.arange(12).view(2, 6)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return {"said": "", "loss": float(loss.detach()), "began": began}
    except SluiceError as error:
        return {"said": f"{type(error).__name__}: {error}", "loss": 0.0, "began": began}
