# SPDX-License-Identifier: Apache-2.0
"""Finds the MoE layers in the blocks of a model, for `sluice.plan_model`: the possible plans of each, and the bytes of
their contexts, which torch does not allocate.

A context has permanent bytes for all of its layers together, and bytes for each forward that waits for its backward. A
budget bounds the sum of torch's peak and the contexts' peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ...errors import InvalidState, SluiceError, Unsupported
from . import function
from .context import Context
from .layer_plan import LayerPlan, PlanChoice, pareto

MOST = 6  # plans of a layer among which the planner chooses
_T = TypeVar("_T")


class _Call(NamedTuple):
    """Describes the forward of a layer within a block ("": outside of all)."""

    block: str
    layer: Any
    num_tokens: int


class MoeLayers:
    """Has the MoE layers of a model whose forward has been run once, by `found`."""

    def __init__(self, calls: Sequence[_Call]) -> None:
        self.contexts: list[Context] = list({id(call.layer.context): call.layer.context for call in calls}.values())
        self._is_shared = any(context.ep_group.world_size > 1 for context in self.contexts)
        budgeted = next((call for call in calls if call.layer.context.is_budgeted), None)
        if budgeted is not None:
            raise Unsupported(
                f'plan_model: MoE layer {budgeted.layer.layer_id} has a "memory_budget" of its own: leave that out, '
                "since the plan of the model gives the layer its share"
            )
        # Layers whose bytes follow from a plan: the only one of their block, of the first context, and computed in C.
        blocks, layers = [call.block for call in calls], [id(call.layer) for call in calls]
        planned = [
            call
            for call in calls
            if call.block
            and blocks.count(call.block) == layers.count(id(call.layer)) == 1
            and call.layer.context is self.contexts[0]
            and call.layer.experts is None
        ]
        self._before = {call.block: (call.layer, call.layer.plan) for call in planned}
        self.plans: dict[str, list[LayerPlan]] = {}  # by block, the fastest first
        self.seconds_per_time = 0.0  # measured seconds for each unit of a plan's time
        tokens = self.agreed(lambda: [call.num_tokens for call in planned], lambda said: list(map(max, zip(*said))))

        def choices() -> list[list[PlanChoice]]:
            return [[plan.choice for plan in pareto(call.layer, most, MOST)] for call, most in zip(planned, tokens)]

        listed = self.agreed(choices, lambda said: said[0])
        for call, most, choices in zip(planned, tokens, listed):
            self.plans[call.block] = [LayerPlan(call.layer, most, choice) for choice in choices]
        self.use({block: plans[0] for block, plans in self.plans.items()})

    @classmethod
    def found(cls, run: Callable[[], None], block: Callable[[], str]) -> MoeLayers:
        """Runs the model. block: returns the name of the block that runs now."""
        calls: list[_Call] = []
        function.on_forward = lambda layer, tokens: calls.append(_Call(block(), layer, tokens))
        try:
            run()
        finally:
            function.on_forward = None
        return cls(calls)

    def agreed(self, work: Callable[[], _T], merge: Callable[[Sequence[_T]], _T]) -> _T:
        """Returns the result of `work`, merged over all ranks if they share experts, because they must decide the same.
        An error on one rank is an error on all."""
        if not self._is_shared:
            return work()
        mine: Any = None
        try:
            mine = work()
        except SluiceError as error:
            mine = error
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, mine if not isinstance(mine, SluiceError) else mine.message)
        if isinstance(mine, SluiceError):
            raise mine
        failed = next((rank for rank, each in enumerate(said) if isinstance(each, str)), None)
        if failed is not None:
            raise InvalidState(f"plan_model: rank {failed} says: {said[failed]}")
        return merge(said)

    def use(self, plans: dict[str, LayerPlan]) -> None:
        """Uses these plans, by block, and frees the memory of other plans."""
        for layer, _ in self._before.values():
            layer.use_plan(None)
        for block, plan in plans.items():
            self._before[block][0].use_plan(plan)

    def undo(self) -> None:
        """Restores the earlier plan of every layer."""
        for layer, _ in self._before.values():
            if layer.context.alive:
                layer.use_plan(None)
        for layer, plan in self._before.values():
            if layer.context.alive and plan is not None:
                layer.use_plan(plan)

    def timed(self, work: Callable[[], _T], times: int) -> _T:
        """Measures seconds_per_time with `work`, which runs the model `times` times under the fastest plans."""
        before = sum(context.stats()["pass_ns"] for context in self.contexts[:1])
        made = work()
        took = sum(context.stats()["pass_ns"] for context in self.contexts[:1]) - before
        whole = sum(plans[0].time for plans in self.plans.values())
        self.seconds_per_time = took / 1e9 / times / whole if whole else 0.0
        return made

    def peak(self, run: Callable[[], Any]) -> tuple[Any, int]:
        """Returns the result of `run`, and the contexts' peak bytes meanwhile."""
        for context in self.contexts:
            context.stats(reset_peak=True)
        made = run()
        return made, sum(context.stats()["peak_bytes"] for context in self.contexts)

    def base_bytes(self, kept_peak: int) -> int:
        """Returns context bytes outside of plans. kept_peak: the peak under the fastest plans, with all blocks kept."""
        fastest = [plans[0] for plans in self.plans.values()]
        fixed = max((plan.fixed_bytes for plan in fastest), default=0)
        return max(kept_peak - fixed - sum(plan.step_bytes for plan in fastest), 0)
