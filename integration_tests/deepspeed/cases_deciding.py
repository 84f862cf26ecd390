# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trainings whose experts move by the option "placement", compared with trainings without moves."""

from __future__ import annotations

import contextlib
import functools
import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from cases_placement import SECTION, UNCLIPPED, kept_bits
from counted_memory import counted
from ds_models import batch, build, ds_config, engine, go_home, said, train
from replaced_collectives import noted_collectives
from shuffles import forgetting
from sluice.adapters.common.migration import background
from sluice.adapters.common.migration import moving as moves
from sluice.adapters.common.migration.background import BackgroundMove
from sluice.adapters.deepspeed.moe import deciding
from sluice.adapters.deepspeed.moe.layer import LayerState
from sluice.planning.placement import PlacementPlan

# With these options every move pays.
WILLING = {"interval": 3, "target": 1.05, "least_gain": 0.01, "horizon": 10**6}


def _positive(step: int, length: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    x, target = batch(step, length, dtype)
    return x.abs(), target


def _favours_the_first(model: Any) -> None:
    """Makes the gate send nearly all rows to half of the experts, those of the first ranks."""
    with torch.no_grad():
        model.first.weight.copy_(torch.eye(*model.first.weight.shape))
        for moe in model.moes:
            gate = moe.deepspeed_moe.gate.wg.weight
            gate[: gate.shape[0] // 2] += 0.6


def _stop_deciding(host: Any) -> None:
    """Replaces the decider after closing it. After the last step all experts move home."""
    host.sluice.decider.close()
    nothing = dict.fromkeys(("before_step", "cancel", "close"), lambda *_: None)
    host.sluice.decider = SimpleNamespace(**nothing, after_step=lambda: go_home(host))


def _shuffled(numbers: Any, loads: Any, expert_rank: Any, expert_slot: Any, *_: Any) -> PlacementPlan:
    """Returns a plan with a random placement, the same on all ranks."""
    places = list(zip(expert_rank, expert_slot))
    numbers.shuffle(places)
    ranks, slots = zip(*places)
    return PlacementPlan(ranks, slots, 1.0, 2, 1, 1, 1, sum(a != b for a, b in zip(ranks, expert_rank)), False)


def _shuffling() -> contextlib.AbstractContextManager[Any]:
    """Makes every decision a random placement."""
    return patch.object(deciding, "plan_placement", functools.partial(_shuffled, random.Random(5)))


def _only_noted(state: Any, placement: Any) -> None:
    """Replaces replace_experts: the engine does not learn of a move."""
    state.placement = placement


def _breaking(name: str) -> contextlib.AbstractContextManager[Any]:
    """Makes the function `name` of background moves fail on rank 1. "": none fails."""

    def fails(*_: Any) -> Any:
        raise RuntimeError(f"{name} has failed")

    if not name or dist.get_rank() != 1:
        return contextlib.nullcontext()
    return patch.object(moves if name == "fill" else background, name, fails)


def decided_training(
    layers: list[dict[str, Any]],
    steps: int,
    config: dict[str, Any] | None = None,
    dtype: str = "float32",
    shuffle: bool = False,
    forget: str = "",
    is_left_out: bool = True,
    stale: bool = False,
    epoch_of_last: int = 0,
    touch: int = -1,
    broken: str = "",
    rate: int | None = None,
    frozen: bool = False,
) -> Any:
    """Returns [unmoved, moved, reports]: results of `train` for both, and the layers' reports before experts move home.

    shuffle: move to a random placement at every decision. forget: state that does not move, as with a faulty host
    (is_left_out), or arrives as zeros. stale: the engine does not learn of a move. epoch_of_last: a wrong epoch on the
    last rank. touch: the step in which other code writes into weights in flight. broken: a function of a move that
    fails on rank 1. rate: bytes per second. frozen: freeze a different parameter of each expert on each rank."""
    reports: list[Any] = []

    def prepare(model: Any) -> None:
        _favours_the_first(model)
        for expert in (each for moe in model.moes for each in moe.deepspeed_moe.experts.deepspeed_experts):
            parameters = list(expert.parameters())
            parameters[dist.get_rank() % len(parameters)].requires_grad_(not frozen)

    def check(host: Any, step: int) -> None:
        if step == touch:
            with torch.no_grad():
                for layer in host.sluice.layers:
                    for parameter in layer.experts.parameters():
                        parameter.mul_(1.0)
        if step == steps - 1:
            reports.extend(state["placement"] for state in host.sluice.stats()["layers"])
            _stop_deciding(host)

    common: dict[str, Any] = {
        "config": {**UNCLIPPED, **(config or {})},
        "dtype": dtype,
        "prepare": prepare,
        "data": _positive,
        "at_end": kept_bits,
    }
    still = train(layers, steps, SECTION, **common)
    first = BackgroundMove.__init__

    def of_another_epoch(self: Any, *given: Any) -> None:
        first(self, *given)
        self._epoch = epoch_of_last

    placement = {**WILLING, "bytes_per_second": rate}
    with contextlib.ExitStack() as faults:
        if shuffle:
            faults.enter_context(_shuffling())
        if stale:
            faults.enter_context(patch.object(LayerState, "replace_experts", _only_noted))
        if epoch_of_last and dist.get_rank() == dist.get_world_size() - 1:
            faults.enter_context(patch.object(BackgroundMove, "__init__", of_another_epoch))
        faults.enter_context(forgetting(forget, is_left_out))
        faults.enter_context(_breaking(broken))
        moved = train(layers, steps, {**SECTION, "placement": placement}, check=check, **common)
    return [still, moved, reports]


def torn_training(layers: list[dict[str, Any]]) -> tuple[str, str]:
    """Returns the errors of a step in which rank 1 fails to install arrived state, and of the next forward."""
    model = build(layers)
    _favours_the_first(model)
    host = engine(model, ds_config(**UNCLIPPED), {**SECTION, "placement": WILLING})
    stepped = ""
    with _breaking("fill"):
        for step in range(14):
            x, target = _positive(step)
            called = said(lambda: host.backward(host(x, target)))  # noqa: B023
            if called:
                return stepped, called
            stepped = said(host.step) or stepped
    return stepped, ""


def counted_training(config: dict[str, Any], dtype: str) -> dict[str, int]:
    """Returns the host memory that moves at every decision take on this rank."""
    layers = [{"num_experts": 8, "k": 2, "expert": "wide", "drop_tokens": False}]

    def check(host: Any, step: int) -> None:
        if step == 10:
            _stop_deciding(host)

    with _shuffling(), counted() as count:
        skewed = {"prepare": _favours_the_first, "data": _positive}
        section = {**SECTION, "placement": WILLING}
        train(layers, 11, section, {**UNCLIPPED, **config}, dtype=dtype, check=check, **skewed)
    return {name: value for name, value in vars(count).items() if not name.startswith("_")}


def even_training(steps: int) -> Any:
    """Returns (reports, collectives that looking at loads has sent) of a training whose loads need no move."""
    host = engine(
        build([{"num_experts": 8, "k": 2}]),
        ds_config(**UNCLIPPED),
        {**SECTION, "placement": {**WILLING, "target": 1.9}},
    )
    sent: list[str] = []
    kind = type(host.sluice.decider.watches[0])
    look = kind.look

    def counted(*args: Any) -> None:
        with noted_collectives(sent):
            look(*args)

    with patch.object(kind, "look", counted):
        for step in range(steps):
            x, target = batch(step)
            host.backward(host(x, target))
            host.step()
    reports = [state["placement"] for state in host.sluice.stats()["layers"]]
    host.sluice.unswap()
    host.destroy()
    return reports, sent


def unswapped() -> Any:
    """Returns the number of moved experts, and whether the weights after unswapping are those of the unmoved run."""
    weights = []
    moved = 0
    for section in (SECTION, {**SECTION, "placement": WILLING}):
        model = build([{"num_experts": 8, "k": 2, "drop_tokens": False}])
        _favours_the_first(model)
        host = engine(model, ds_config(**UNCLIPPED), section)
        for step in range(7):
            x, target = _positive(step)
            host.backward(host(x, target))
            host.step()
        moved += sum(state.get("placement", {}).get("moved_experts", 0) for state in host.sluice.stats()["layers"])
        host.sluice.unswap()
        weights.append([parameter.detach().clone() for parameter in host.module.parameters()])
        host.destroy()
    return moved, all(torch.equal(a, b) for a, b in zip(*weights))
