# SPDX-License-Identifier: Apache-2.0
"""`sluice plan`: says whether a model fits a machine, which n and restore policy each layer uses, and why no other."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

from .. import timeline
from ..timeline.schedule import LANE_NAMES, Schedule
from . import arguments, command, files, finetune_command, optimizer_command, routing, split_command, stages_command
from .errors import BadInput
from .model import Model, complete
from .planner import (
    DEDUPLICATIONS,
    Candidate,
    Choice,
    Decision,
    Planner,
    Prediction,
    Workload,
    priced_activation,
    size,
    way_by_price,
    words_of_error,
)

EXAMPLE = """examples:
  sluice plan --machine h200-8x8 --ranks 8 --config mixtral/config.json --tokens 8192 --budget 20GiB
  sluice plan --machine a100-8x8-1600g --ranks 64 --model-width 2048 --hidden-width 8192 --experts 64 --top-k 2 \\
              --tokens 8192 --layers 4 --budget 6GiB --picture plan.svg
  sluice plan --machine h200-8x8 --config train_mixtral.sh                     a script of Megatron's, with its flags
  sluice plan --machine h200-8x8 --config ds_config.json --config config.json --sequence-length 4096      AutoEP
  sluice plan --stages model.json      all layers of a model, over the stages of a pipeline or one (--stages --help)
  sluice plan --split model.json       which ranks are stages, replicas and expert groups (--split --help)
  sluice plan --finetune config.json --memory 64GiB     what fine-tuning with LoRA takes (--finetune --help)
  sluice plan --optimizer 1.5e9        what an offloaded optimizer's step takes (--optimizer 1 --help)

exit status: 0 it fits; 1 it does not; 2 wrong arguments or files
"""


@command.refuses("sluice plan")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if command.wants(words, "--stages"):
        return stages_command.main(words)
    if command.wants(words, "--optimizer"):
        return optimizer_command.main(words)
    if command.wants(words, "--finetune"):
        return finetune_command.main(words)
    if command.wants(words, "--split"):
        return split_command.main(words)
    parser = command.parser("sluice plan", __doc__, EXAMPLE)
    arguments.add_machine(parser)
    parser.add_argument("--ranks", type=int, metavar="W", help="of one expert-parallel group; default: the config's")
    arguments.add_model(parser)
    arguments.add_choice(parser)
    parser.add_argument("--skew", type=float, help="rows of the most loaded rank / rows of balanced routing (1)")
    parser.add_argument("--routing", metavar="FILE", help="recorded expert loads, which give the skew of each layer")
    parser.add_argument(
        "--outstanding", type=int, metavar="N", help="forwards that wait for their backward (one per layer)"
    )
    parser.add_argument(
        "--all", action="store_true", help="print every candidate with its reason, not only the best of each policy"
    )
    options = command.parsed(parser, words, picture="the predicted timeline of the first layer")
    for name, value in (("--ranks", options.ranks), ("--outstanding", options.outstanding)):
        if value is not None and value < 1:
            raise BadInput(f"{name} is {value}; it must be above 0")
    model = arguments.model_of(options)
    options.ranks = options.ranks or model.ranks
    if options.ranks is None:
        raise BadInput("--ranks is missing: give it, or a --config that says how experts are shared out")
    planner = Planner(arguments.machine_of(options, model, options.ranks))
    made = plan(planner, complete(model), options)
    fits = all(layer["decision"].chosen for layer in made["layers"])
    return command.answer(
        options.json, lambda: as_dict(made, planner), lambda: lines_of(made, planner, options.all), fits
    )


def workload_of(model: Model, ranks: int, skew: float) -> Workload:
    """Returns each layer's workload. In training every layer has one forward outstanding, or as many as configured."""
    return Workload(
        model_width=model.model_width,
        hidden_width=model.hidden_width,
        num_tokens=model.tokens,
        num_experts=model.num_experts,
        top_k=model.top_k,
        world_size=ranks,
        dtype=model.dtype,
        gated=bool(model.gated),
        skew=skew,
        memory_budget=model.memory_budget or 0,
        host_memory_budget=model.host_memory_budget or 0,
        max_outstanding=model.max_outstanding or model.layers,
        deduplicate="adaptive" if model.deduplicate is None else model.deduplicate,
        chunking=model.chunking or "adaptive",
        activation=priced_activation(model.activation),
        may_keep_part=True,
        lora_rank=model.lora_rank or 0,
        weight_format=model.weight_format or "plain",
    )


def plan(planner: Planner, model: Model, options: Any) -> dict[str, Any]:
    """Returns {"model", "layers": [{"layers", "workload", "decision", "prediction"}]}; layers of equal skew share a
    row."""
    if options.outstanding is not None:
        model = Model(max_outstanding=options.outstanding).over(model)
    skews = [1.0 if options.skew is None else options.skew] * model.layers
    if options.routing:
        if options.skew is not None:
            raise BadInput("--skew and --routing exclude each other; give one")
        trace = routing.read(options.routing)
        skews = [trace.skew(layer, options.ranks, model.num_experts) for layer in range(model.layers)]
    groups: dict[float, list[int]] = {}
    for layer, skew in enumerate(skews):
        groups.setdefault(round(skew, 2), []).append(layer)
    rows = []
    for skew, layers in sorted(groups.items(), key=lambda group: group[1][0]):
        work = way_by_price(planner, workload_of(model, options.ranks, skew), arguments.wanted_of(model))
        decision = planner.choose(work, arguments.wanted_of(model))
        prediction = planner.predict(work, decision.chosen, timeline=not rows) if decision.chosen else None
        other = _other_way(planner, work, arguments.wanted_of(model)) if prediction else None
        rows.append(
            {"layers": layers, "workload": work, "decision": decision, "prediction": prediction, "other": other}
        )
    if options.picture and rows[0]["prediction"]:
        drawn = picture(rows[0]["workload"], rows[0]["decision"].chosen, rows[0]["prediction"])
        files.write("--picture", options.picture, drawn)
    elif options.picture:
        print(f"sluice plan: no {options.picture}: what would be drawn does not fit", file=sys.stderr)
    return {"model": model, "layers": rows}


def _other_way(planner: Planner, work: Workload, wanted: Choice) -> tuple[Choice, Prediction] | None:
    """Returns choice and prediction with deduplication switched. None: it changes nothing or does not fit."""
    if work.world_size == 1 or work.top_k == 1:
        return None
    other = replace(work, deduplicate=not work.deduplicate)
    chosen = planner.choose(other, wanted).chosen
    return (chosen, planner.predict(other, chosen)) if chosen else None


def picture(work: Workload, choice: Choice, prediction: Prediction) -> str:
    """Draws the predicted passes of one layer, with their slots if the schedule can be built."""
    panels = []
    under_plan = work.memory_budget > 0 or work.host_memory_budget > 0
    for direction, seconds in (("forward", prediction.forward), ("backward", prediction.backward)):
        events = [event for event in prediction.events[direction] if event.seconds > 0]
        panel = timeline.Panel(f"{direction}: {seconds * 1e3:.2f} ms predicted ({choice})", events)
        schedule = Schedule.build(
            direction,
            prediction.run_chunks,
            *choice.restores(prediction.run_chunks, under_plan),
            wgrad=choice.wgrad,
            single_rank=work.world_size == 1,
            gated=work.gated,
            under_plan=under_plan,
            may_reuse_saved=direction == "backward",
            deduplicate=DEDUPLICATIONS[work.deduplicate] if work.world_size > 1 else 0,
        )
        every = prediction.events[direction]
        if [op["kind"] for op in schedule.data["ops"]] == [event.op for event in every]:
            panel.holds = timeline.occupancy(schedule.data, [e.begin for e in every], [e.end for e in every])
        panels.append(panel)
    return timeline.svg(panels, f"One layer of {work.world_size} ranks, predicted")


def best_of_each(decision: Decision) -> list[Candidate]:
    """Returns the candidates that people compare: of each policy, for all chunks and for part of them, the fastest one
    that fits, else the one with the fewest bytes."""
    best: dict[tuple[str, bool], Candidate] = {}
    for candidate in decision.candidates:
        kind = candidate.choice.policy, candidate.choice.kept_chunks > 0
        held = best.get(kind)
        if held is None or _rank(candidate) < _rank(held):
            best[kind] = candidate
    return sorted(best.values(), key=_rank)


def _rank(candidate: Candidate) -> tuple[Any, ...]:
    if candidate.verdict.startswith("over"):
        return 1, candidate.total_bytes, candidate.seconds
    return 0, candidate.seconds, candidate.verdict != "chosen"


def lines_of(made: dict[str, Any], planner: Planner, everything: bool) -> list[str]:
    """Returns the lines for a terminal."""
    model = made["model"]
    budget = size(model.memory_budget) if model.memory_budget else "none"
    if model.host_memory_budget:
        budget += f", {size(model.host_memory_budget)} for offloaded rows"
    shape = f"M {model.model_width}, H {model.hidden_width}, E {model.num_experts}, K {model.top_k}, {model.dtype}"
    lines = [
        f"machine {planner.machine.name}; {model.layers} MoE layers of {shape}; "
        f"T {model.tokens} on each rank; budget {budget}"
    ]
    if "measured at" in planner.machine.sources:
        lines.append(f"calibrated at {planner.machine.sources['measured at']} ({planner.machine.sources['cache']})")
    total = 0.0
    for row in made["layers"]:
        names = row["layers"]
        span = f"layers {names[0]}-{names[-1]}" if names == list(range(names[0], names[-1] + 1)) else f"layers {names}"
        decision, prediction = row["decision"], row["prediction"]
        lines += ["", f"{span if len(names) > 1 else f'layer {names[0]}'} (skew {row['workload'].skew:g})"]
        if prediction is None:
            lines.append(f"  DOES NOT FIT: {decision.shortfall}")
        else:
            total += prediction.seconds * len(names)
            lines += _chosen(decision, prediction)
            if row["other"]:
                lines.append(_compared(row["workload"], prediction, *row["other"]))
        lines += ["", *command.table(_HEADS, map(_row, decision.candidates if everything else best_of_each(decision)))]
    if total:
        lines += ["", f"all MoE layers of a step: {total * 1e3:.2f} ms; " + error_of(made["layers"][0]["prediction"])]
        lines.append("not included: time of the host outside of passes (Python, autograd, the rest of the model)")
    return lines


_HEADS = {"n": ">4", "policy": "<26", "weight gradients": "<17", "ms": ">9", "bytes": ">11", " why": ""}


def _row(c: Candidate) -> tuple[Any, ...]:
    wgrad = c.choice.wgrad.replace("_", " ")
    return c.choice.num_chunks, c.choice.where, wgrad, command.ms(c.seconds), size(c.total_bytes), f" {c.reason()}"


def error_of(prediction: Prediction | None) -> str:
    """Returns a phrase about the machine's prediction error."""
    return "error not measured" if prediction is None else words_of_error(prediction.error_median, prediction.error_p90)


def _chosen(decision: Decision, p: Prediction) -> list[str]:
    lanes = ", ".join(f"{lane} {p.busy(lane) * 1e3:.2f}" for lane in LANE_NAMES if p.busy(lane) > 0)
    shares = ", ".join(f"{name} {size(value)}" for name, value in p.bytes.items() if value and name != "total")
    lines = [
        f"  chosen: {decision.chosen}",
        f"  predicted: {p.seconds * 1e3:.2f} ms a layer in a step: forward {p.forward * 1e3:.2f}, "
        f"backward {p.backward * 1e3:.2f}",
        f"  busy by lane (ms): {lanes}; second opinions: MPMoE {p.mpmoe * 1e3:.2f}, MPipeMoE {p.mpipemoe * 1e3:.2f}",
        f"  bytes on a rank: {size(p.bytes['total'])} = {shares} (step: of each outstanding forward)",
    ]
    kept, chunks = decision.chosen.kept_chunks, decision.chosen.num_chunks
    if kept:
        lines.append(
            f"  the budget has room for the first {kept} chunks; the other {chunks - kept} are sent and computed again"
        )
    if p.run_chunks != decision.chosen.num_chunks:
        lines.append(f"  under this skew it runs with {p.run_chunks} chunks, at most {p.max_chunks}")
    return lines


def _compared(work: Workload, chosen: Prediction, choice: Choice, other: Prediction) -> str:
    """Returns a line about the effect of deduplication on rows sent and on seconds of the step."""
    rows = chosen.sent_rows, other.sent_rows
    with_it, without = rows if work.deduplicate else rows[::-1]
    share = f"{100 * with_it / without:.0f} % of the rows travel with it"
    word = "not deduplicated" if work.deduplicate else "deduplicated"
    faster = 100 * (chosen.seconds / other.seconds - 1)
    return f"  {word}: {other.seconds * 1e3:.2f} ms a layer in a step ({choice}; {faster:+.1f} % speed); {share}"


def as_dict(made: dict[str, Any], planner: Planner) -> dict[str, Any]:
    """Returns what --json prints."""
    rows = []
    for row in made["layers"]:
        decision, prediction = row["decision"], row["prediction"]
        rows.append(
            {
                "layers": row["layers"],
                "workload": asdict(row["workload"]),
                "fits": decision.chosen is not None,
                "chosen": {**asdict(decision.chosen), "policy": decision.chosen.policy} if decision.chosen else None,
                "shortfall": decision.shortfall or None,
                "prediction": _numbers(prediction) if prediction else None,
                "other_way": _numbers(row["other"][1]) if row["other"] else None,
                "candidates": [candidate.as_dict() for candidate in decision.candidates],
            }
        )
    return {"form": 1, "machine": planner.machine.name, "sources": planner.machine.sources, "layers": rows}


def _numbers(prediction: Prediction) -> dict[str, Any]:
    values = {name: value for name, value in vars(prediction).items() if name != "events"}
    return {**values, "seconds": prediction.seconds}
