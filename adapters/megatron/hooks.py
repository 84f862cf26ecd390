# SPDX-License-Identifier: Apache-2.0
"""Runs hooks of the modules of experts, whose `forward` is not called if C computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as nn_module

# Megatron's own hooks, which wait for parameters that are still being gathered (overlap_param_gather).
_OF_DDP = "DistributedDataParallel._make_forward_pre_hook.<locals>.hook"


def replay(modules: Iterable[nn.Module]) -> None:
    """Runs the host's own pre-hooks, as calls of these modules would: their parameters are gathered afterwards."""
    for module in modules:
        for hook in list(module._forward_pre_hooks.values()):
            if _is_of_ddp(hook):
                hook(module, ())


def untouched(modules: Iterable[nn.Module]) -> bool:
    """Returns whether there are no hooks but the host's own, and no forward on an instance, so that C computes as a
    call would."""
    if nn_module._has_any_global_hook():
        return False
    return all(_is_untouched(module) for module in modules)


def _is_untouched(module: nn.Module) -> bool:
    state = module.__dict__
    return not (
        state["_forward_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
        or state.get("_compiled_call_impl") is not None
        or "parametrizations" in state["_modules"]
        or any(not _is_of_ddp(hook) for hook in state["_forward_pre_hooks"].values())
    )


def _is_of_ddp(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__qualname__", "") == _OF_DDP and str(getattr(hook, "__module__", "")).startswith("megatron.")
