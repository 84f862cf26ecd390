# SPDX-License-Identifier: Apache-2.0
"""Runs the layer as one node of the autograd graph.

Tokens, route weights and every expert parameter are its inputs, and all their gradients its outputs. A host's hooks on
gradients (ZeRO, FSDP, DDP, accumulation) therefore run as with torch's own operations, for idle experts too. Without
such hooks a backward adds to an existing `.grad` itself (accumulate.py). Everything that outlives forward is saved with
`save_for_backward`: the version counters then catch an in-place change, and activation checkpointing and saved-tensor
hooks reach all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from .lora import Lora
from .passes import Pass

# Modes of torch that have to see every operation, and cannot see inside a call into a C library. Most of them would
# raise no error, but give a graph without the experts, or tangents that end there.
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


# If set, it is called with each layer and its number of tokens before a forward that a backward may follow.
on_forward: Callable[[Any, int], None] | None = None


class _MoeFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: Any, expert_ids: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        tokens, route_weights, *flat = inputs
        out = work.layer.forward_pass(work, tokens, expert_ids, route_weights, flat)
        saved, work.saved = work.saved, []
        ctx.work = work
        ctx.num_inputs = len(inputs)
        ctx.num_saved = len(saved)
        graphs: list[torch.Tensor] = []
        if work.experts is not None:
            graphs, work.experts.saved = work.experts.saved, []
        ctx.save_for_backward(*inputs, *saved, *graphs)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _backward(ctx, grad_out, torch.is_grad_enabled())  # grad mode is on if create_graph=True


@once_differentiable
def _backward(ctx: Any, grad_out: torch.Tensor, creates_graph: bool) -> tuple[torch.Tensor | None, ...]:
    work = ctx.work
    try:
        kept = ctx.saved_tensors  # raises if an input was changed in place, or freed by an earlier backward
    except RuntimeError as error:
        work.layer.refuse(error, backward=True)
        raise
    tokens, route_weights, *flat = kept[: ctx.num_inputs]
    end = ctx.num_inputs + ctx.num_saved
    saved = kept[ctx.num_inputs : end]
    if work.experts is not None:
        work.experts.saved = list(kept[end:])
    try:
        with work.layer.turn:
            if not creates_graph and work.lora is None:
                work.sums = work.layer.sums_for(ctx, work, [grad_out, *kept[: ctx.num_inputs]])
            grads = work.layer.backward_pass(
                work, tokens, route_weights, flat, saved, grad_out, ctx.needs_input_grad[2:]
            )
    finally:
        work.sums = None  # the graph may outlive this backward, and must not keep them
        if work.experts is not None:
            work.experts.saved = []
    return (None, None, *grads)


def run_layer(
    layer: Any,
    tokens: torch.Tensor,
    expert_ids: torch.Tensor,
    route_weights: torch.Tensor,
    flat: Sequence[torch.Tensor],
    counts: Sequence[int],
    lora: Lora | None = None,
) -> torch.Tensor:
    """Runs forward, recorded for autograd if any input requires a gradient."""
    record = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (tokens, route_weights, *flat))
    work = Pass(layer, record, flat, counts, lora)
    if record and on_forward is not None:
        on_forward(layer, tokens.shape[0])
    if not record:
        return layer.forward_pass(work, tokens, expert_ids, route_weights, flat)
    return _MoeFunction.apply(work, expert_ids, tokens, route_weights, *flat)
