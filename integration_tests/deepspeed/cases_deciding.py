# SPDX-License-Identifier: Apache-2.0
"""Rank-side: trainings whose experts move by the option "placement", compared with trainings without moves."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from cases_placement import SECTION, UNCLIPPED, kept_bits
from counted_memory import counted
from ds_models import batch, build, ds_config, engine, train
from replaced_collectives import noted_collectives
from shuffles import forgetting
from sluice.adapters.common.migration import background
from sluice.adapters.common.migration import moving as moves
from sluice.adapters.common.migration.background import BackgroundMove
from sluice.adapters.deepspeed.moe import deciding
from sluice.adapters.deepspeed.moe.state import LayerState
from sluice.errors import SluiceError
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


class _Home:
    """Replaces the decider after closing it. After the last step all experts move home."""

    def __init__(self, host: Any) -> None:
        self._host = host
        host.sluice.decider.close()

    def before_step(self) -> None:
        pass

    def cancel(self, reason: str) -> None:
        pass

    def close(self) -> None:
        pass

    def after_step(self) -> None:
        with self._host.sluice.at_home(False):
            pass


def _shuffled(numbers: Any, loads: Any, expert_rank: Any, expert_slot: Any, *_: Any) -> PlacementPlan:
    """Returns a plan with a random placement, the same on all ranks."""
    places = list(zip(expert_rank, expert_slot))
    numbers.shuffle(places)
    ranks, slots = zip(*places)
    return PlacementPlan(ranks, slots, 1.0, 2, 1, 1, 1, sum(a != b for a, b in zip(ranks, expert_rank)), False)


@contextlib.contextmanager
def _breaking(name: str) -> Iterator[None]:
    """Makes the function `name` of background moves fail on rank 1."""
    owner = moves if name == "fill" else background

    def fails(*_: Any) -> Any:
        raise RuntimeError(f"{name} has failed")

    if not name or dist.get_rank() != 1:
        yield
        return
    original = getattr(owner, name)
    setattr(owner, name, fails)
    try:
        yield
    finally:
        setattr(owner, name, original)


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
            host.sluice.decider = _Home(host)

    plan, replace, first = deciding.plan_placement, LayerState.replace_experts, BackgroundMove.__init__
    common: dict[str, Any] = {
        "config": {**UNCLIPPED, **(config or {})},
        "dtype": dtype,
        "prepare": prepare,
        "data": _positive,
        "at_end": kept_bits,
    }
    still = train(layers, steps, SECTION, **common)
    if shuffle:
        deciding.plan_placement = functools.partial(_shuffled, random.Random(5))
    if stale:
        LayerState.replace_experts = lambda state, placement: setattr(state, "placement", placement)
    if epoch_of_last and dist.get_rank() == dist.get_world_size() - 1:
        BackgroundMove.__init__ = lambda self, *given: (first(self, *given), setattr(self, "_epoch", epoch_of_last))[0]
    placement = {**WILLING, "bytes_per_second": rate}
    try:
        with forgetting(forget, is_left_out), _breaking(broken):
            moved = train(layers, steps, {**SECTION, "placement": placement}, check=check, **common)
    finally:
        deciding.plan_placement, LayerState.replace_experts, BackgroundMove.__init__ = plan, replace, first
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
            try:
                host.backward(host(x, target))
            except SluiceError as error:
                return stepped, str(error)
            try:
                host.step()
            except SluiceError as error:
                stepped = str(error)
    return stepped, ""


def counted_training(config: dict[str, Any], dtype: str) -> dict[str, int]:
    """Returns the host memory that moves at every decision take on this rank."""
    plan, deciding.plan_placement = deciding.plan_placement, functools.partial(_shuffled, random.Random(5))
    layers = [{"num_experts": 8, "k": 2, "expert": "wide", "drop_tokens": False}]

    def check(host: Any, step: int) -> None:
        if step == 10:
            host.sluice.decider = _Home(host)

    try:
        with counted() as count:
            skewed = {"prepare": _favours_the_first, "data": _positive}
            section = {**SECTION, "placement": WILLING}
            train(layers, 11, section, {**UNCLIPPED, **config}, dtype=dtype, check=check, **skewed)
    finally:
        deciding.plan_placement = plan
    return {name: value for name, value in vars(count).items() if not name.startswith("_")}


def even_training(steps: int) -> Any:
    """Returns (reports, collectives that looking at loads has sent) of a training whose loads need no move."""
    host = engine(
        build([{"num_experts": 8, "k": 2}]),
        ds_config(**UNCLIPPED),
        {**SECTION, "placement": {**WILLING, "target": 1.9}},
    )
    sent: list[str] = []
    look = type(host.sluice.decider.watches[0]).look

    def counted(*args: Any) -> None:
        with noted_collectives(sent):
            look(*args)

    type(host.sluice.decider.watches[0]).look = counted
    try:
        for step in range(steps):
            x, target = batch(step)
            host.backward(host(x, target))
            host.step()
    finally:
        type(host.sluice.decider.watches[0]).look = look
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
