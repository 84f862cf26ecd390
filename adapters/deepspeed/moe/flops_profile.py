# SPDX-License-Identifier: Apache-2.0
"""Supports DeepSpeed's flops profiler (`flops_profiler` in ds_config).

The profiler hooks every module, on rank 0 only and for one step, and counts the calls of torch's functions. Its hooks
change no result, so experts need not be called as modules because of them. Otherwise rank 0 would run its layers
differently from the other ranks, which the header of a call refuses. This module adds the GEMMs that C computes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from sluice.adapters.deepspeed.moe.finding import Form

_PROFILER = "deepspeed.profiling.flops_profiler.profiler"
_HANDLES = (
    "__pre_hook_handle__",
    "__post_hook_handle__",
    "__start_time_hook_handle__",
    "__end_time_hook_handle__",
    "__flops_handle__",
)


def has_set_all(state: dict[str, Any], kind: str) -> bool:
    """Returns whether each of a module's hooks of this kind is the profiler's. state: the module's attributes."""
    own = {state[name].id for name in _HANDLES if name in state}
    return own.issuperset(state[kind])


def count(form: Form, expert_ids: torch.Tensor) -> None:
    """Adds the GEMMs of a pass that C computed to the running module, if the profiler counts. The number of rows is
    that of the routes of this rank's tokens, which is what a rank computes if routing is even."""
    profiler = sys.modules.get(_PROFILER)
    flops, macs = (getattr(profiler, name, None) for name in ("module_flop_count", "module_mac_count"))
    if not flops or not macs:
        return
    rows = int((expert_ids >= 0).sum())
    gemms = rows * form.model_width * form.hidden_width * (3 if form.gated else 2)
    flops[-1].append(("sluice", 2 * gemms))
    macs[-1].append(("sluice", gemms))
