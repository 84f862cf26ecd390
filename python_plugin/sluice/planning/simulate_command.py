# SPDX-License-Identifier: Apache-2.0
"""`sluice simulate`: predicts weak and strong scaling of a model on a machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from ..timeline import colours, shapes
from . import (
    arguments,
    batches_command,
    command,
    device_step,
    files,
    optimizer_command,
    routing,
    simulate,
)
from .errors import BadInput
from .model import Model, complete
from .plan_command import error_of, workload_of
from .planner import Planner, size

EXAMPLE = """examples:
  sluice simulate --machine h200-8x8 --ranks 8,64,512,1024 --layers 32 --model-width 4096 --hidden-width 14336 \\
                  --top-k 2 --tokens 8192 --gated --zipf 0.3 --picture scaling.svg
  sluice simulate --machine a100-8x8-200g --ranks 8,16,32,64 --scaling strong --experts 64 --model-width 2048 \\
                  --hidden-width 8192 --top-k 1 --tokens 16384 --dtype f16 --json

exit status: 0 all points fit; 1 one does not fit its budget or its device; 2 wrong arguments or files
"""


@command.refuses("sluice simulate")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    if command.wants(words, "--stages"):
        return batches_command.main(words)
    if command.wants(words, "--optimizer"):
        return optimizer_command.simulate(words)
    if command.wants(words, "--device"):
        return device_step.main(words)
    parser = command.parser("sluice simulate", __doc__, EXAMPLE)
    arguments.add_machine(parser)
    parser.add_argument("--ranks", required=True, metavar="W,W,...", help=f"ascending, at most {simulate.MOST_RANKS}")
    parser.add_argument("--scaling", choices=("weak", "strong", "both"), default="weak", help="(%(default)s)")
    parser.add_argument("--experts-per-rank", type=int, metavar="N", help="weak scaling (1)")
    arguments.add_model(parser)
    arguments.add_choice(parser)
    parser.add_argument("--skew", type=float, help="rows of the most loaded rank / rows of balanced routing")
    parser.add_argument("--zipf", type=float, metavar="S", help="loads of experts by Zipf's law: 1 / place ** S")
    parser.add_argument("--seed", type=int, default=0, help="of Zipf's placement (%(default)s)")
    parser.add_argument("--routing", metavar="FILE", help="recorded expert loads, replayed")
    parser.add_argument("--other-ms", type=float, default=0.0, help="time of the rest of the model, per MoE layer (0)")
    options = command.parsed(parser, words, picture="efficiency against ranks")
    model = arguments.model_of(options)
    planner = Planner(arguments.machine_of(options, model, None))
    made = run(planner, model, options)
    if options.picture:
        files.write("--picture", options.picture, _picture(made, planner))
    fits = not any(p.shortfall for points in made["scaling"].values() for p in points)
    return command.answer(options.json, lambda: as_dict(made, planner), lambda: lines_of(made, planner), fits)


def _picture(made: dict[str, Any], planner: Planner) -> str:
    curves = {
        f"{name} scaling": [(p.ranks, e) for p, e in zip(points, simulate.efficiency(points))]
        for name, points in made["scaling"].items()
    }
    return _plot(curves, f"Efficiency on {planner.machine.name}")


def run(planner: Planner, model: Model, options: Any) -> dict[str, Any]:
    """Returns {"model", "scaling": {"weak": [points], ...}}."""
    counts = _counts(options.ranks)
    simulate.check_ranks(counts)
    if not 0 <= options.other_ms < math.inf:
        raise BadInput(f"--other-ms is {options.other_ms:g}; it is a time, 0 or more")
    per_rank = options.experts_per_rank
    if per_rank is None:
        per_rank = max(1, model.num_experts // counts[0]) if model.num_experts else 1
        if options.scaling != "strong" and model.num_experts and model.num_experts % counts[0] != 0:
            raise BadInput(
                f"weak scaling: {model.num_experts} experts do not divide over {counts[0]} ranks: begin --ranks with a "
                "number that divides them, or give --experts-per-rank"
            )
    if per_rank < 1:
        raise BadInput(f"--experts-per-rank is {per_rank}; it must be above 0")
    if options.scaling != "weak" and model.num_experts is None:
        raise BadInput("--experts is missing: strong scaling keeps the number of experts")
    model = complete(model.over(Model(num_experts=per_rank * counts[0])))
    trace = routing.read(options.routing) if options.routing else None
    if trace is not None:
        _check_trace(trace, options, counts, per_rank, model.num_experts)
    source = simulate.skew_source(options.skew, options.zipf, trace, model.top_k, options.seed)
    wanted = arguments.wanted_of(model)
    simulator = simulate.Simulator(planner, model.layers, wanted, options.other_ms / 1e3)
    work = workload_of(model, counts[0], 1.0)

    scaling = {}
    if options.scaling in ("weak", "both"):
        scaling["weak"] = simulate.weak(simulator, work, per_rank, counts, source, command.progress)
    if options.scaling in ("strong", "both"):
        scaling["strong"] = simulate.strong(simulator, work, model.num_experts, counts, source, command.progress)
    command.progress("")
    return {"model": model, "scaling": scaling, "error": simulator.newest}


def _check_trace(trace: routing.Routing, options: Any, counts: list[int], per_rank: int, experts: int | None) -> None:
    """Raises BadInput if the trace has another number of experts than the simulation, and says which options match."""
    found = f"routing: recorded with {trace.experts} experts, asked about"
    if options.scaling != "weak" and experts != trace.experts:
        raise BadInput(f"{found} {experts} by strong scaling: give --experts {trace.experts}")
    wrong = [ranks for ranks in counts if per_rank * ranks != trace.experts]
    if options.scaling == "strong" or not wrong:
        return
    asked = f"{found} {per_rank * wrong[0]} at {wrong[0]} ranks by weak scaling"
    fits = [ranks for ranks in counts if trace.experts % ranks == 0]
    if len(counts) == 1 and fits:
        raise BadInput(f"{asked}: give --experts-per-rank {trace.experts // fits[0]}")
    strong = f"--scaling strong --experts {trace.experts}"
    if fits:
        one = f"one number of ranks, --ranks {fits[-1]} --experts-per-rank {trace.experts // fits[-1]}"
        raise BadInput(f"{asked}, where experts grow with the ranks: give {one}, or {strong}")
    raise BadInput(f"{asked}: choose --ranks that divide {trace.experts}, or give {strong} or --skew")


def _counts(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise BadInput(f"--ranks: {text!r} is not a list of whole numbers such as 8,64,512") from None


def lines_of(made: dict[str, Any], planner: Planner) -> list[str]:
    """Returns the lines for a terminal."""
    model = made["model"]
    shape = f"M {model.model_width}, H {model.hidden_width}, K {model.top_k}, {model.dtype}"
    lines = [f"machine {planner.machine.name}; {model.layers} MoE layers of {shape}"]
    for name, points in made["scaling"].items():
        lines += ["", f"{name} scaling (a step of all MoE layers; efficiency against the first row)"]
        shares = zip(points, simulate.efficiency(points))
        says_by, memory = model.deduplicate in _OPEN, planner.machine.memory_bytes
        lines += command.table(
            _HEADS,
            (row for p, share in shares for row in (_row(p, share, says_by), *_stock_rows(p, memory))),
        )
        lines += [f"does not fit on {p.ranks} ranks: {p.shortfall}" for p in points if p.shortfall]
        lines += _conclusion(points, memory)
    modelled = any(p.stock for points in made["scaling"].values() for p in points)
    lines += ["", *_ABOUT_STOCK] if modelled else []
    lines += ["", "unsplit: n = 1, everything kept; balanced: without the skew; comm: busy share of the fullest rank;"]
    lines.append("usual: bytes of a rank with these rows; at most: under any routing, which a budget bounds;")
    lines.append(
        "parameters: of all layers' experts, with gradients. Not included: optimizer states, the rest of the model"
    )
    return [*lines, error_of(made["error"])]


def _conclusion(points: Sequence[simulate.Point], memory: int) -> list[str]:
    """Returns sentences about the most ranks that fit: their speed, its limit, and comparisons with stock steps."""
    fitting = [(p, share) for p, share in zip(points, simulate.efficiency(points)) if not p.shortfall]
    if not fitting:
        return []
    point, share = fitting[-1]
    limit = "communication" if point.comm_busy > point.compute_busy else "computation"
    busy = max(point.comm_busy, point.compute_busy) / point.seconds
    said = [
        f"On {point.ranks} ranks a step of these layers takes {command.ms(point.seconds)} ms at {100 * share:.1f} % "
        f"efficiency; {limit} limits it, which is busy {100 * busy:.0f} % of the time."
    ]
    return said + [_against(point, name, other, memory) for name, other in point.stock.items()]


def _is_too_large(point: simulate.Point, other: simulate.Stock, memory: int) -> bool:
    return memory > 0 and other.kept_bytes + point.expert_bytes > memory


def _against(point: simulate.Point, name: str, other: simulate.Stock, memory: int) -> str:
    """Returns a sentence that compares Sluice's step with the modelled step of a stock framework."""
    computed = other.computation - point.compute_busy
    rest = other.seconds - point.seconds - computed
    padded = (
        f" ({100 * (other.rows_over_real - 1):.0f} % more rows, for padding)" if other.rows_over_real > 1.005 else ""
    )
    parts = [
        f"{command.ms(abs(seconds))} ms {'more' if seconds >= 0 else 'less'} {what}"
        for seconds, what in (
            (rest, "of exchanges and row movement in sequence"),
            (computed, f"of computation{padded}"),
        )
    ]
    model = "a model, if the device had the memory" if _is_too_large(point, other, memory) else "a model"
    return (
        f"Sluice's step takes {command.ms(point.seconds)} ms, stock {name}'s {command.ms(other.seconds)} ms ({model}): "
        f"Sluice is {other.seconds / point.seconds:.2f} times as fast; stock has {' and '.join(parts)}."
    )


_ABOUT_STOCK = (
    "stock: a model of DeepSpeed's MoE layer without dropping, and of Megatron-Core's MoELayer with grouped GEMMs,",
    "with the same rates: what they do in sequence, without the gate, which runs on both sides; usual: the rows that",
    "they keep for the backward",
)


def _stock_rows(p: simulate.Point, memory: int) -> list[list[Any]]:
    rows = []
    for name, other in p.stock.items():
        short = "too large" if _is_too_large(p, other, memory) else ""
        comm = f"{100 * other.exchange / other.seconds:.0f}%"
        speed = f"{p.ranks * p.tokens / other.seconds / 1e6:.2f}"
        times = [command.ms(other.seconds), "", ""]
        rows.append(
            ["", "", "", "", "", f"stock {name}", *times, comm, speed, "", size(other.kept_bytes), "", "", short]
        )
    return rows


_HEADS = {
    "ranks": ">6", "experts": ">7", "T": ">7", "skew": ">5", "n": ">3", "policy": "<20", "ms": ">9", "unsplit": ">9",
    "balanced": ">9", "comm": ">6", "Mtok/s": ">8", "eff.": ">6", "usual": ">10", "at most": ">10",
    "parameters": ">10", "": "",
}  # fmt: skip


_OPEN = (None, "adaptive", "rank_or_node")
_BY = {False: "", True: "by rank", "node": "by node"}


def _row(p: simulate.Point, share: float, says_by: bool) -> list[Any]:
    row = [p.ranks, p.experts, p.tokens, f"{p.skew_median:.2f}"]
    if p.choice is None:
        return row
    times = [command.ms(seconds) for seconds in (p.seconds, p.unsplit_seconds, p.balanced_seconds)]
    speed = [f"{100 * p.comm_busy / p.seconds:.0f}%", f"{p.tokens_per_second / 1e6:.2f}", f"{100 * share:.1f}%"]
    by = _BY[p.deduplicate] if says_by else ""
    taken = [size(p.usual_bytes), size(p.total_bytes), size(p.expert_bytes)]
    return [*row, p.choice.num_chunks, p.choice.where, *times, *speed, *taken, by]


def as_dict(made: dict[str, Any], planner: Planner) -> dict[str, Any]:
    """Returns what --json prints."""
    scaling = {name: _with_efficiency(points) for name, points in made["scaling"].items()}
    error = made["error"]
    errors = {"median": error.error_median or None, "p90": error.error_p90 or None} if error else None
    return {"form": 1, "machine": planner.machine.name, "error": errors, "scaling": scaling}


def _with_efficiency(points: Sequence[simulate.Point]) -> list[dict[str, Any]]:
    return [{**p.as_dict(), "efficiency": e} for p, e in zip(points, simulate.efficiency(points))]


WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 640, 360, 70, 40, 50


def _plot(curves: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """Returns the plot. curves: {name: [(ranks, efficiency)]}. The axis of ranks is logarithmic."""
    every = [ranks for points in curves.values() for ranks, _ in points]
    low, high = math.log2(min(every)), math.log2(max(every))
    span = max(high - low, 1.0)
    top = max(1.0, *(value for points in curves.values() for _, value in points))

    def x(ranks: int) -> float:
        return LEFT + (math.log2(ranks) - low) / span * (WIDTH - LEFT - 30)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - value / top * (HEIGHT - TOP - BOTTOM)

    body = [shapes.text(12, 22, title, 14, weight="bold")]
    for value in (0.0, 0.25, 0.5, 0.75, 1.0):
        place = f'x1="{LEFT}" x2="{WIDTH - 30}" y1="{y(value):.1f}" y2="{y(value):.1f}"'
        body.append(f'<line {place} stroke="{colours.GRID}"/>')
        body.append(shapes.text(LEFT - 8, y(value) + 4, f"{100 * value:.0f} %", 11, "end"))
    body += [shapes.text(x(ranks), HEIGHT - BOTTOM + 18, str(ranks), 11, "middle") for ranks in sorted(set(every))]
    body.append(shapes.text(WIDTH / 2, HEIGHT - 12, "ranks", 12, "middle"))
    for number, (name, points) in enumerate(curves.items()):
        colour = colours.numbered(number)
        line = " ".join(f"{x(ranks):.1f},{y(value):.1f}" for ranks, value in points)
        body.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for ranks, value in points:
            tip = f"<title>{escape(name)}, {ranks} ranks: {100 * value:.1f} %</title>"
            body.append(f'<circle cx="{x(ranks):.1f}" cy="{y(value):.1f}" r="3.5" fill="{colour}">{tip}</circle>')
        row = HEIGHT - BOTTOM - 12 - 16 * number
        body += [shapes.rect(LEFT + 12, row - 9, 10, 10, colour), shapes.text(LEFT + 27, row, name)]
    return shapes.document(WIDTH, HEIGHT, body)
