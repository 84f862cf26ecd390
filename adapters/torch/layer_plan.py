# SPDX-License-Identifier: Apache-2.0
"""Makes plans of one MoE layer (`sluice/plan.h`): the possible choices, their bytes and times, and the plan that its
passes run under."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from ... import restore
from ..._library import load
from ._native import generation
from .context import release

_WGRAD = {-1: "adaptive", 0: "deferred", 1: "per_chunk"}
_MOST = 512  # candidates of a plan


class PlanChoice(NamedTuple):
    """Has the number of chunks, and the library's numbers of restore policies and weight-gradient mode."""

    num_chunks: int
    restore_input: int
    restore_pre_activation: int
    wgrad_mode: int

    @classmethod
    def of_words(cls, num_chunks: int, restore_input: str, restore_pre_activation: str, wgrad: str) -> PlanChoice:
        """Returns the choice that the planner's words name."""
        wgrad_mode = next(number for number, word in _WGRAD.items() if word == wgrad)
        return cls(num_chunks, restore.INPUT[restore_input], restore.PRE_ACTIVATION[restore_pre_activation], wgrad_mode)

    def __str__(self) -> str:
        pair = restore.name_of(self.restore_input), restore.name_of(self.restore_pre_activation)
        policy = restore.set_name(pair) or "+".join(map(str, pair))
        return f"n {self.num_chunks}, {policy}, weight gradients {_WGRAD[self.wgrad_mode].replace('_', ' ')}"


class LayerPlan:
    """Plans forwards of up to `num_tokens` tokens on any rank; `outstanding` of them may wait for their backward.

    choice        the chunks, policies and weight-gradient mode of its passes
    step_bytes    bytes of one forward that waits for its backward
    fixed_bytes   bytes that the context holds at all times, once for all of its layers: the most of their plans
    base_bytes    other bytes of the context, now
    time          of a forward and backward, comparable between plans of one layer (sluice/plan.h: relative_time)
    """

    def __init__(self, layer: Any, num_tokens: int, choice: PlanChoice | None = None, outstanding: int = 1) -> None:
        """Makes a plan without a budget. choice: None: the fastest that the layer's config leaves open."""
        library = load()
        config = library.new("plan_config")
        config.max_tokens, config.max_outstanding = num_tokens, outstanding
        for name, value in zip(PlanChoice._fields, choice or ()):
            setattr(config, name, value)
        out = library.ffi.new("sluice_plan_t **")
        library.check(library.lib.sluice_plan_create(layer.handle, config, out))
        self.handle = out[0]
        self._finalizer = weakref.finalize(self, release, library.lib.sluice_plan_destroy, out[0], generation())
        self._finalizer.atexit = False
        info = library.ffi.new("sluice_plan_info_t *")
        info.struct_size = library.ffi.sizeof(info[0])
        library.check(library.lib.sluice_plan_get_info(self.handle, info))
        self.choice = PlanChoice(info.num_chunks, info.restore_input, info.restore_pre_activation, info.wgrad_mode)
        self.step_bytes, self.base_bytes = int(info.step_bytes), int(info.base_bytes)
        self.fixed_bytes = int(info.total_bytes - info.base_bytes - outstanding * info.step_bytes)
        self.time = float(info.relative_time)

    def others(self) -> list[PlanChoice]:
        """Returns all choices that were considered, in order."""
        library = load()
        lines = library.ffi.new("sluice_plan_candidate_t[]", _MOST)
        count = library.ffi.new("int32_t *")
        library.check(library.lib.sluice_plan_candidates(self.handle, lines, _MOST, count))
        return [PlanChoice(*(getattr(line, name) for name in PlanChoice._fields)) for line in lines[0 : count[0]]]


def pareto(layer: Any, num_tokens: int, most: int) -> list[LayerPlan]:
    """Returns the Pareto front of a layer's plans in time and bytes, fastest first. If it has more than `most` plans,
    those whose bytes are nearest to a faster plan's are left out."""
    fastest = LayerPlan(layer, num_tokens)
    plans = [LayerPlan(layer, num_tokens, choice) for choice in dict.fromkeys(fastest.others())]
    found: list[LayerPlan] = []
    for plan in sorted(plans, key=lambda plan: (plan.time, plan.step_bytes, plan.fixed_bytes)):
        if not any(other.step_bytes <= plan.step_bytes and other.fixed_bytes <= plan.fixed_bytes for other in found):
            found.append(plan)
    while len(found) > most:
        steps = [
            abs(a.step_bytes - b.step_bytes) + abs(a.fixed_bytes - b.fixed_bytes) for a, b in zip(found, found[1:])
        ]
        del found[1 + min(range(len(steps)), key=steps.__getitem__) if len(found) > 2 else -1]
    return found
