# SPDX-License-Identifier: Apache-2.0
"""Experts that change ranks, under any host: `sluice.move_experts` and `sluice.experts_at_home`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from sluice import layer_lookup as resolve
from sluice.errors import InvalidArgument


def move_experts(layer: Any, expert_rank: Sequence[int], expert_slot: Sequence[int], optimizer: Any = None) -> None:
    """Expert e of a layer goes to slot expert_slot[e] of rank expert_rank[e] of its expert-parallel group, with its
    parameters, gradients, master copies and all that the optimizer keeps of it (moments, step counts).

    layer      one that runs on Sluice: DeepSpeed's or AutoEP's, Megatron's MoELayer, an experts module of transformers
               under ep_implementation="sluice"
    optimizer  the one that trains it, as the host gives it; None: there is none, and gradients go alone

    Each rank keeps as many experts as it has: lists that say otherwise are Unsupported. Between steps: InvalidState
    while a forward waits for its backward. Collective over the layer's group, and over ranks that hold replicas of its
    experts: all give the same lists, or all get the error, and nothing has moved then. The training goes on with the
    bits that it would have had, where docs/c-abi.md promises them.
    """
    kept = resolve.kept_of(layer)
    if kept is None or not hasattr(kept, "move"):
        raise InvalidArgument(
            f"move_experts: {resolve.name_of(layer)} is no layer that runs on Sluice: give one of the layers in a model"
        )
    kept.move(layer, expert_rank, expert_slot, optimizer)


def start_moving_experts(
    layer: Any,
    expert_rank: Sequence[int],
    expert_slot: Sequence[int],
    optimizer: Any,
    bytes_per_second: int | None = None,
) -> Any:
    """The same beside the optimizer's next steps: what a step has left travels over connections of its own while the
    next forwards and backwards run, gradients follow in front of the next step, and then all ranks have moved, or none.

    An experts module of transformers, and an optimizer of torch, whose step hooks drive it; DeepSpeed has
    "placement": "adaptive". Call it before a step, on all ranks alike. In one round a rank gives one expert at most and
    gets one, so a placement may take some steps; further calls wait for their turn. While it lasts, weights of experts
    change in optimizer.step() alone: where somebody else writes into them, the move is given up on all ranks.

    What is returned has `has_ended`, `num_moves` (experts that have changed their rank), `why_not` (given up, and why),
    `left_bytes`, and `hidden_bytes` of them that were out before the step. bytes_per_second: of a rank, None: as fast
    as the link takes them; of an optimizer's first call. Losses of ranks are errors of optimizer.step().
    """
    kept = resolve.kept_of(layer)
    if kept is None or not hasattr(kept, "start_moving"):
        raise InvalidArgument(
            f"start_moving_experts: {resolve.name_of(layer)} is no module whose experts are shared out by "
            'ep_implementation="sluice": sluice.move_experts moves experts of other hosts at once'
        )
    return kept.start_moving(layer, expert_rank, expert_slot, optimizer, bytes_per_second)


@contextmanager
def experts_at_home(model: Any, optimizer: Any = None) -> Iterator[None]:
    """Within it all experts of a model lie where its host believes them to be, and behind it where they lay before:
    around what reads or writes state dicts, which number experts by their place. Collective, as move_experts.

    model      a DeepSpeed engine will do too, whose optimizer is known
    optimizer  the one that the experts moved with
    """
    from sluice.adapters.common.migration import moving

    def mover(kept: Any, module: Any) -> Callable[[Any], None]:
        return lambda placement: kept.move(module, *placement, optimizer)

    found = [(kept, module) for module in model.modules() if (kept := resolve.kept_of(module)) is not None]
    layers = [(kept, mover(kept, module)) for kept, module in found if hasattr(kept, "placement")]
    with moving.at_home(layers, and_back=True):
        yield
