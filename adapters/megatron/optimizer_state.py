# SPDX-License-Identifier: Apache-2.0
"""Finds the states that Megatron's optimizers have of an expert's parameters (adapters/common/optimizer_state.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sluice.adapters.common.optimizer_state import Gradient, Keeper, Masters, State, Together
from sluice.errors import Unsupported
from torch import nn


def keeper_of(name: str, parameters: Sequence[nn.Parameter], optimizer: Any) -> Keeper:
    """Returns the keeper of an optimizer's states. Unsupported if it is not known where the optimizer keeps them.

    Gradients are in `main_grad`, a view of a buffer of DDP's, and in `grad` if there is no DDP, or if the optimizer's
    step has put them there.
    """
    gradients = Gradient(), Gradient("main_grad")
    if optimizer is None:
        return Together(*gradients)
    every = getattr(optimizer, "chained_optimizers", None) or [optimizer]
    bases = [base for each in every if _is_plain(base := getattr(each, "optimizer", each))]
    masters = Masters([pair for each in every for pair in _pairs(each)])
    owners = {id(kept): base.state for base in bases for group in base.param_groups for kept in group["params"]}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not all(id(masters.of(parameter)) in owners for parameter in trained):
        kinds = ", ".join(sorted({type(each).__name__ for each in every}))
        raise Unsupported(
            f"{name}: experts cannot move under {kinds}, whose parts of parameters Sluice cannot find: disable "
            "use_distributed_optimizer and CPU offloading, or pass the optimizer that trains the experts"
        )

    def kept_of(parameter: nn.Parameter) -> Any:
        tensor = masters.of(parameter)
        return owners.get(id(tensor), {}), tensor

    return Together(*gradients, masters, State(kept_of))


def _is_plain(base: Any) -> bool:
    """Returns whether its `state` is by the tensors of param_groups; hybrid optimizers have copies elsewhere."""
    return isinstance(base, torch.optim.Optimizer) and not hasattr(base, "sub_optimizers")


def _pairs(optimizer: Any) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Returns 16-bit parameters with their masters."""
    lists = zip(getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()))
    return [pair for own, copies in lists for pair in zip(own, copies)]
