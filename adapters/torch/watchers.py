# SPDX-License-Identifier: Apache-2.0
"""Finds modes of torch that have to see every operation, and cannot see inside a call into a C library.

Most of them would raise no error, but give a graph without the experts, or tangents that end there.
"""

from __future__ import annotations

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

_tracing_state = torch._C._get_tracing_state
_num_modes = torch._C._len_torch_dispatch_stack
_num_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch
_mode = torch._C._get_dispatch_mode
_FAKE, _PROXY = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def watcher() -> str | None:
    """Returns the mode that is active now, in words; None: none is. Takes a fraction of a microsecond."""
    if _functorch.peek_interpreter_stack() is not None:
        return "a torch.func transform (vmap, grad, jvp, ...)"
    if forward_ad._current_level >= 0:
        return "forward-mode differentiation"
    if _tracing_state() is not None:
        return "torch.jit.trace"
    if _num_early_modes():
        return "torch.export or make_fx"
    if _num_modes() == 0:
        return None
    if _mode(_PROXY) is not None:
        return "torch.export or make_fx"
    return "FakeTensorMode" if _mode(_FAKE) is not None else None
