# SPDX-License-Identifier: Apache-2.0
"""Moves experts between ranks, for all hosts: `sluice.move_experts`, `start_moving_experts` and `experts_at_home`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sluice import layer_lookup as resolve
from sluice.errors import InvalidArgument


def move_experts(layer: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
    """Moves expert e of a layer to slot expert_slot[e] of rank expert_rank[e] of its expert-parallel group, with its
    parameters, gradients, master weights and optimizer state (moments, step counts).

    layer      a layer that runs on Sluice: DeepSpeed's or AutoEP's, Megatron's MoELayer, an experts module of
               transformers under ep_implementation="sluice"
    optimizer  the optimizer that trains the layer, as the host returns it; None: there is none

    The number of experts per rank must not change: other lists raise Unsupported. Call it between steps: a forward that
    waits for its backward raises InvalidState. It is collective over the layer's group, and over ranks that hold
    replicas of its experts. All ranks pass the same lists; otherwise all raise the error, and nothing has moved.
    Training continues with the same bits as without the move, where docs/c-abi.md promises them.
    """
    kept = resolve.kept_of(layer)
    if kept is None or not hasattr(kept, "move"):
        raise InvalidArgument(
            f"move_experts: {resolve.name_of(layer)} is not a layer that runs on Sluice: give a layer of a model"
        )
    kept.move(layer, expert_rank, expert_slot, optimizer)


def start_moving_experts(
    layer: Any,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    optimizer: Any,
    bytes_per_second: int | None = None,
) -> Any:
    """Moves experts as move_experts does, but asynchronously. After an optimizer step, weights and optimizer state are
    sent over separate connections while the next forwards and backwards run. Gradients follow just before the next
    step; the new placement then takes effect on every rank or on none.

    Supported are an experts module of transformers and an optimizer of torch, whose step hooks drive the move; for
    DeepSpeed use "placement": "adaptive". Call it before a step, on all ranks. In one round a rank sends and receives
    at most one expert, so a placement may take several steps; further calls are queued. During a move, only
    optimizer.step() may change weights of experts: other writes cancel the move on all ranks.

    The returned object has `has_ended`, `num_moves` (experts that have changed ranks), `why_not` (why the move was
    cancelled), `left_bytes` (bytes sent) and `hidden_bytes` (bytes sent before the step). bytes_per_second limits each
    rank; None: the speed of the link. An optimizer's first call sets it. optimizer.step() raises if a rank is lost.
    """
    kept = resolve.kept_of(layer)
    if kept is None or not hasattr(kept, "start_moving"):
        raise InvalidArgument(
            f"start_moving_experts: {resolve.name_of(layer)} is not a module whose experts are divided by "
            'ep_implementation="sluice": sluice.move_experts moves experts of other hosts at once'
        )
    return kept.start_moving(layer, expert_rank, expert_slot, optimizer, bytes_per_second)


@contextmanager
def experts_at_home(model: Any, optimizer: Any = None) -> Iterator[None]:
    """Moves all experts of a model to the ranks where the host expects them, and on exit back to their last ranks. Use
    it around code that reads or writes state dicts, which number experts by position. Collective, as move_experts.

    model      a model, or a DeepSpeed engine, whose optimizer is known
    optimizer  the optimizer that was passed when the experts moved
    """
    from sluice.adapters.common.migration import moving

    def mover(kept: Any, module: Any) -> Callable[[Any], None]:
        return lambda placement: kept.move(module, *placement, optimizer)

    found = [(kept, module) for module in model.modules() if (kept := resolve.kept_of(module)) is not None]
    layers = [(kept, mover(kept, module)) for kept, module in found if hasattr(kept, "placement")]
    with moving.at_home(layers, and_back=True):
        yield
