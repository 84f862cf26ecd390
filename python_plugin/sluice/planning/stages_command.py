# SPDX-License-Identifier: Apache-2.0
"""`sluice plan --stages`: plans which stage runs each layer, and how its activations are restored, under budgets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from . import arguments, command, files, machines, stages, stages_file, stages_picture
from .errors import BadInput
from .planner import Planner, size

EXAMPLE = """example:
  sluice plan --stages model.json --budget 20GiB

  {"sluice_stages": 1, "stages": 2, "micro_batches": 8, "budget": "3GiB", "machine": "h200-8x8",
   "layers": [{"name": "attention", "forward_seconds": 2e-3, "backward_seconds": 4e-3, "recompute_seconds": 2e-3,
               "activation_bytes": "400MiB", "checkpoint_bytes": "64MiB", "output_bytes": "64MiB", "repeat": 4},
              {"name": "MoE", "moe": {"model_width": 4096, "hidden_width": 14336, "num_tokens": 8192,
               "num_experts": 8, "top_k": 2, "world_size": 8, "gated": true}, "output_bytes": "64MiB"}]}

exit status: 0 it fits; 1 it does not; 2 wrong arguments or files
"""


@command.refuses("sluice plan")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice plan --stages", __doc__, EXAMPLE)
    parser.add_argument("--stages", required=True, metavar="FILE", help="the problem as JSON (docs/tools.md)")
    parser.add_argument("--budget", metavar="BYTES", help="of every stage; overrides the file")
    parser.add_argument("--machine", metavar="NAME|FILE", help="of MoE layers; overrides the file")
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--picture", metavar="FILE.svg", help="stages, policies, and bytes against budgets")
    shown.add_argument(
        "--layout", choices=["megatron"], help="print only the value for --pipeline-model-parallel-layout"
    )
    options = command.parsed(parser, words)
    given = stages_file.read(options.stages)
    problem, budget = given.problem, arguments.budget_of(options.budget)
    if budget is not None:
        problem = replace(problem, budget_bytes=(budget,) * problem.num_stages)
    name = options.machine or given.machine
    planner = None if name is None else Planner(machines.load(name))
    made = stages.plan(problem, planner)
    if options.picture:
        files.write("--picture", options.picture, stages_picture.svg(problem, made, lines_of(problem, made)[:2]))
    if options.layout:
        return _print_layout(problem, made)
    return command.answer(
        options.json, lambda: as_dict(problem, made), lambda: lines_of(problem, made), not made.shortfall
    )


def _print_layout(problem: stages.Problem, made: stages.Plan) -> int:
    if made.shortfall:
        print(f"sluice plan: DOES NOT FIT: {made.shortfall}", file=sys.stderr)
        return 1
    names, stage_of = [layer.name for layer in problem.layers], [choice.stage for choice in made.choices]
    layout, lost = layout_of(names, stage_of, problem.num_stages), lost_in(made.choices)
    print(layout)
    if lost:
        print(f"sluice plan: {lost}", file=sys.stderr)
    return 0


def lines_of(problem: stages.Problem, plan: stages.Plan) -> list[str]:
    """Returns the lines for a terminal."""
    lines = [f"{counted(len(problem.layers), 'layer')} on {counted(problem.num_stages, 'stage')}, " + _load(problem)]
    if plan.shortfall:
        lines += [f"DOES NOT FIT: {plan.shortfall}", "what takes the fewest bytes:"]
    else:
        found = "no plan is faster" if plan.is_optimal else "the best that was found"
        lines.append(
            f"a step takes {command.ms(plan.step_seconds, 3)} ms; the slowest stage is {plan.slowest_stage} "
            f"with {command.ms(plan.slowest_seconds, 3)} ms a micro-batch; {found}"
        )
    heads = {"stage": ">5", "layers": "<12", "k": ">3", "ms": ">9", "messages": ">9", "copies": ">9", "again": ">9"}
    stage_rows = (_stage_row(plan, index) for index in range(len(plan.stages)))
    width = max(len(layer.name) for layer in problem.layers)
    wide = max(6, *(len(choice.policy) for choice in plan.choices))
    layer_rows = []
    for index, (layer, choice) in enumerate(zip(problem.layers, plan.choices)):
        share = f" (share of the budget {size(choice.moe.total_bytes)})" if choice.moe else ""
        layer_rows.append((index, layer.name, choice.stage, choice.policy, choice.reason + share))
    return [
        *lines,
        "",
        *command.table({**heads, "bytes": ">11", "  of budget": ""}, stage_rows),
        "",
        *command.table(
            {"layer": ">5", "name": f"<{width}", "stage": ">5", "policy": f"<{wide}", "why": ""}, layer_rows
        ),
    ]


def _stage_row(plan: stages.Plan, index: int) -> list[Any]:
    stage = plan.stages[index]
    members = [i for i, choice in enumerate(plan.choices) if choice.stage == index]
    budget = stage["budget_bytes"]
    share = f"{size(budget)} {100 * stage['bytes'] / budget:.0f} %" if budget else "none"
    seconds = [command.ms(stage[f"{name}seconds"], 3) for name in ("", "message_", "copy_", "extra_")]
    return [index, _span(members), stage["in_flight"], *seconds, size(stage["bytes"]), " " + share]


def _load(problem: stages.Problem) -> str:
    if problem.num_stages == 1:
        return counted(problem.num_micro_batches, "micro-batch", "es")
    return f"{counted(problem.num_micro_batches, 'micro-batch', 'es')}, {problem.schedule}"


def counted(count: int, word: str, plural: str = "s") -> str:
    """Returns a number with its noun in singular or plural."""
    return f"{count} {word}{'' if count == 1 else plural}"


def _span(members: list[int]) -> str:
    """Formats layers as "0-5" or "0-2,4", since a stage of a graph may have several runs."""
    runs: list[list[int]] = []
    for layer in members:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def as_dict(problem: stages.Problem, plan: stages.Plan) -> dict[str, Any]:
    """Returns what --json prints."""
    layers = [
        {
            "name": layer.name,
            **{name: value for name, value in vars(choice).items() if name != "moe"},
            "moe": _moe(layer, choice),
            "share_bytes": None if choice.moe is None else choice.moe.total_bytes,
        }
        for layer, choice in zip(problem.layers, plan.choices)
    ]
    return {
        "form": 1,
        "fits": not plan.shortfall,
        "shortfall": plan.shortfall or None,
        "blocking_stage": plan.blocking_stage if plan.shortfall else None,
        "smallest_budget": plan.smallest_budget_bytes if plan.shortfall else None,
        "short_bytes": plan.short_bytes if plan.shortfall else None,
        "step_seconds": plan.step_seconds,
        "slowest_seconds": plan.slowest_seconds,
        "slowest_stage": plan.slowest_stage,
        "is_optimal": plan.is_optimal,
        "stages": [{key: value for key, value in stage.items() if key != "reserved"} for stage in plan.stages],
        "layers": layers,
    }


def _moe(layer: stages.Layer, choice: stages.Choice) -> dict[str, Any] | None:
    """Returns the plan of a MoE layer in the form that hosts read."""
    if choice.moe is None or layer.moe is None:
        return None
    chosen = choice.moe.choice
    return {**asdict(chosen), "policy": chosen.policy, "tokens": layer.moe.num_tokens}


# ---- the value of Megatron-Core's `--pipeline-model-parallel-layout`: a letter for each layer, `|` between stages ----

LETTERS = {"embedding": "E", "loss": "L", "mtp": "m"}  # by the name of a layer; any other is a transformer layer
_ORDER = "EtmL"


def layout_of(names: Sequence[str], stage_of: Sequence[int], num_stages: int) -> str:
    """Returns the layout of layers in the order in which they run. Raises BadInput for a plan that a layout cannot
    express. If embedding and loss are not among the layers, they are put on the first and on the last stage."""
    if list(stage_of) != sorted(stage_of):
        raise BadInput("stages of this plan are not runs of consecutive layers, which a layout cannot express")
    rows = ["".join(LETTERS.get(name, "t") for name, at in zip(names, stage_of) if at == s) for s in range(num_stages)]
    letters = "".join(rows)
    if "E" not in letters:
        rows[0] = "E" + rows[0]
    if "L" not in letters:
        rows[-1] += "L"
    letters = "".join(rows)
    order = [_ORDER.index(letter) for letter in letters]
    if order != sorted(order) or letters.count("E") > 1 or letters.count("L") > 1:
        raise BadInput(
            f"the layers are {letters} in Megatron's letters: one embedding first, transformer layers, then layers "
            'named "mtp", one "loss" last'
        )
    return "|".join(rows)


def lost_in(choices: Sequence[stages.Choice]) -> str:
    """Returns a sentence about the part of the plan that a layout cannot express; "": there is none."""
    kinds = sorted({choice.kind for choice in choices if choice.kind in (stages.RECOMPUTE, stages.OFFLOAD)})
    if not kinds:
        return ""
    layers = [str(index) for index, choice in enumerate(choices) if choice.kind in kinds]
    return (
        f"a layout defines where layers run, not how: the plan has {' and '.join(kinds)} for layers "
        f"{', '.join(layers)}; see Megatron's --recompute-method and --recompute-num-layers"
    )
