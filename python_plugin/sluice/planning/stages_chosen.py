# SPDX-License-Identifier: Apache-2.0
"""Reads a plan of layers over stages from the output of `sluice plan --stages --json`, or plans a model from its
file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from .. import restore
from ..errors import OverBudget
from ..timeline.schedule import WGRAD
from . import files, machines, stages, stages_command, stages_file
from .errors import BadInput
from .planner import Planner


class MoeChoice(NamedTuple):
    """Has the plan of a MoE layer. tokens: the most on any rank."""

    num_chunks: int
    restore_input: str
    restore_pre_activation: str
    wgrad: str
    tokens: int


@dataclass(frozen=True)
class Chosen:
    """parts: stage s has the layers from parts[s] to before parts[s + 1]. kinds: by layer, how activations reach the
    backward. moe: by layer, the plan of its MoE layer, None: it has none."""

    parts: tuple[int, ...]
    kinds: tuple[str, ...]
    moe: tuple[MoeChoice | None, ...] = ()

    @classmethod
    def of_layers(
        cls, stage_of: Sequence[int], kinds: Sequence[str], num_stages: int, moe: Sequence[MoeChoice | None]
    ) -> Chosen:
        """Raises BadInput unless each stage has a run of at least one layer, in order."""
        if sorted(stage_of) != list(stage_of) or set(stage_of) != set(range(num_stages)):
            raise BadInput(
                f"layers lie on stages {list(stage_of)}: a pipeline of {num_stages} stages needs consecutive layers "
                "on each stage, in ascending order, at least one each"
            )
        bounds = [sum(stage < s for stage in stage_of) for s in range(num_stages)]
        return cls((*bounds, len(stage_of)), tuple(kinds), tuple(moe))


def read(path: str, num_layers: int, num_stages: int, budget: int | None = None) -> Chosen:
    """Reads a plan of `num_layers` layers on `num_stages` stages. budget: bytes of each stage, overrides the file.

    Raises BadInput that names file and field; OverBudget if nothing fits.
    """
    text = files.read(path, path)
    try:
        data = files.from_json("", text)
        if isinstance(data, Mapping) and "form" in data:
            return _printed(data, num_layers, num_stages, budget)
        return _planned(text, num_layers, num_stages, budget)
    except (BadInput, OverBudget) as error:
        raise type(error)(f"{path}: {error.message}") from None


def _check_counts(layers: int, stages_there: int, num_layers: int, num_stages: int) -> None:
    if (layers, stages_there) != (num_layers, num_stages):
        raise BadInput(
            f"it is a plan of {layers} layers on {stages_there} stages, and the model has {num_layers} on {num_stages}"
        )


def _printed(data: Mapping[str, Any], num_layers: int, num_stages: int, budget: int | None) -> Chosen:
    if data["form"] != 1:
        raise BadInput(f"form is {data['form']!r}; this version reads 1")
    layers, there = data.get("layers"), data.get("stages")
    if not isinstance(layers, list) or not isinstance(there, list):
        raise BadInput("layers and stages must be lists, as `sluice plan --stages --json` prints them")
    if data.get("fits") is not True:
        raise BadInput("it says that nothing fits: plan with a larger budget")
    _check_counts(len(layers), len(there), num_layers, num_stages)
    for index, stage in enumerate(there):
        takes = stage.get("bytes") if isinstance(stage, Mapping) else None
        if budget is not None and (not isinstance(takes, int) or takes > budget):
            raise OverBudget(f"stages[{index}].bytes is {takes!r}, over the budget of {budget}: plan with that budget")
    for index, layer in enumerate(layers):
        if not isinstance(layer, Mapping) or not isinstance(layer.get("stage"), int) or layer.get("kind") not in _KINDS:
            raise BadInput(f"layers[{index}] must have a stage, a number, and a kind of {', '.join(_KINDS)}")
    moe = [None if layer.get("moe") is None else _moe_choice(index, layer) for index, layer in enumerate(layers)]
    return Chosen.of_layers([layer["stage"] for layer in layers], [layer["kind"] for layer in layers], num_stages, moe)


def _planned(text: str, num_layers: int, num_stages: int, budget: int | None) -> Chosen:
    given = stages_file.parse(text)
    problem = given.problem
    _check_counts(len(problem.layers), problem.num_stages, num_layers, num_stages)
    if budget is not None:
        problem = replace(problem, budget_bytes=(budget,) * num_stages)
    made = stages.plan(problem, None if given.machine is None else Planner(machines.load(given.machine)))
    if made.shortfall:
        raise OverBudget(made.shortfall)
    return _printed(stages_command.as_dict(problem, made), num_layers, num_stages, None)


_KINDS = stages.KINDS


# ---- plans of MoE layers alone ----


def read_moe(path: str) -> list[MoeChoice]:
    """Returns the plans of the MoE layers, in order, from the output of `sluice plan --stages --json`.

    For hosts that divide layers into stages themselves. Raises BadInput that names file and field, also for layers that
    the plan recomputes or offloads as a whole, since only the host could do so.
    """
    try:
        data = files.from_json("", files.read(path, path))
        if not isinstance(data, Mapping) or data.get("form") != 1 or not isinstance(data.get("layers"), list):
            raise BadInput("it must be what `sluice plan --stages --json` prints, of form 1")
        if data.get("fits") is not True:
            raise BadInput("it says that nothing fits: plan with a larger budget")
        every = [_moe_choice(index, layer) for index, layer in enumerate(data["layers"])]
    except BadInput as error:
        raise BadInput(f"{path}: {error.message}") from None
    found = [choice for choice in every if choice is not None]
    if not found:
        raise BadInput(f"{path}: it has no MoE layer: give layers of the model a moe, as docs/tools.md says")
    return found


def _moe_choice(index: int, layer: Any) -> MoeChoice | None:
    where = f"layers[{index}]"
    moe = layer.get("moe") if isinstance(layer, Mapping) else layer
    if isinstance(layer, Mapping) and moe is None:
        if layer.get("kind") != stages.KEEP:
            raise BadInput(
                f"{where}.kind is {layer.get('kind')!r}: a layer without a moe is kept here; plan with may_recompute "
                "and may_offload false, or let the host recompute it"
            )
        return None
    if not isinstance(moe, Mapping):
        raise BadInput(f"{where} must have a moe, an object or null")
    known = {
        "restore_input": restore.INPUT,
        "restore_pre_activation": restore.PRE_ACTIVATION,
        "wgrad": {word: number for word, number in WGRAD.items() if number >= 0},
    }
    for name, words in known.items():
        if moe.get(name) not in words:
            raise BadInput(f"{where}.moe.{name} is {moe.get(name)!r}; known are {', '.join(words)}")
    for name in ("num_chunks", "tokens"):
        if not isinstance(moe.get(name), int) or isinstance(moe[name], bool) or moe[name] < 1:
            raise BadInput(f"{where}.moe.{name} is {moe.get(name)!r}; it must be a number above 0")
    return MoeChoice(*(moe[name] for name in MoeChoice._fields))
