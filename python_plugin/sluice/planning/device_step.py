# SPDX-License-Identifier: Apache-2.0
"""Records one step of a layer without a GPU, by `sluice-dry-step`, and counts and prices its calls.

Counts are of the calls that the code makes. Seconds are those of a model.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .._library import REINSTALL
from . import command, device_prices, files
from .device_clock import Clock, Result
from .device_prices import Prices
from .errors import BadInput

PROGRAM = "sluice-dry-step"
ENVIRONMENT = "SLUICE_DRY_STEP"  # path of a program to run instead of the package's
TIMEOUT_SECONDS = 600
GEMMS_BY = "SLUICE_CUBLAS"  # overrides the engine's choice of how lists of GEMMs run
MOST_RANKS = 8  # number of fake devices
ROWS = ("gather_rows", "scatter_rows", "move_rows", "combine_rows", "scale_rows", "round_rows")
ACTIVATIONS = ("activation_",)


@dataclass(frozen=True)
class Shape:
    """Describes a layer. tokens: of each rank, which computes as many rows as it sends."""

    tokens: int
    model_width: int
    hidden_width: int
    experts: int
    top_k: int

    def floor_seconds(self, prices: Prices) -> float:
        """Returns a lower bound: only the GEMMs and both weighted sums over rows, at the rates of good kernels."""
        rows = self.tokens * self.top_k
        flops = 3 * 2 * rows * self.model_width * 3 * self.hidden_width
        moved = 2 * (rows + self.tokens) * self.model_width * 2
        floor = prices.data["floor"]
        return float(flops / floor["flops_per_second"] + moved / floor["bytes_per_second"])


SHAPES = {
    "mixtral": Shape(16384, 4096, 14336, 8, 2),
    "qwen3": Shape(16384, 2048, 768, 128, 8),
    "deepseek": Shape(16384, 7168, 2048, 256, 8),
}


@dataclass(frozen=True)
class Counts:
    """Calls of the rank that launches most.

    waits: of the host for its GPU; headers: exchanges between hosts, which do not wait for a GPU. row_bytes and
    activation_bytes are read and written, link_bytes are sent.
    """

    launches: int
    forward_launches: int
    waits: int
    headers: int
    event_waits: int
    groups: int
    grouped_calls: int
    single_calls: int
    gemms: int
    copies: int
    other_calls: int
    row_bytes: int
    activation_bytes: int
    link_bytes: int


@dataclass(frozen=True)
class Step:
    """Describes a priced step. seconds: of the model; by_kind: seconds of works if each ran alone."""

    shape: str
    ranks: int
    chunks: int
    device: str
    gemms_by: str | None  # None: the engine's choice
    counts: Counts
    seconds: float
    floor_seconds: float
    by_kind: dict[str, float]
    busy: float
    filled: float

    @property
    def of_floor(self) -> float:
        return self.floor_seconds / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Returns what --json prints."""
        return {"form": 1, "is_model": True, **asdict(self), "of_floor": self.of_floor}


def program_path() -> str:
    """Returns the path of the program that records. Raises BadInput if the program is missing."""
    named = os.environ.get(ENVIRONMENT)
    path = named or os.fspath(Path(__file__).resolve().parent.parent / "lib" / PROGRAM)
    if not os.path.isfile(path):
        remedy = f"unset {ENVIRONMENT}, or set it to a {PROGRAM}" if named else REINSTALL
        raise BadInput(f"{path} does not exist, which records a step: {remedy}")
    return path


def shape_of(name: str) -> Shape:
    if name not in SHAPES:
        raise BadInput(f"--shape {name!r}: known are {', '.join(SHAPES)}")
    return SHAPES[name]


def record(shape: Shape, ranks: int, chunks: int, prices: Prices) -> list[Any]:
    """Returns the calls of all ranks in one step, in the form of backend/device/cuda/fake/fake_record.h."""
    if not 1 <= ranks <= MOST_RANKS or shape.experts % ranks != 0:
        fits = ", ".join(str(n) for n in range(1, MOST_RANKS + 1) if shape.experts % n == 0)
        raise BadInput(f"--ranks {ranks}: {shape.experts} experts are held by one of {fits} ranks in a dry step")
    numbers = {**asdict(shape), "ranks": ranks, "chunks": chunks, "device_bytes": int(prices.data["device_bytes"])}
    words = [program_path(), *(f"{name}={value}" for name, value in numbers.items())]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BadInput(f"{PROGRAM} does not run: {error}") from error
    if done.returncode != 0:
        raise BadInput((done.stderr.strip() or f"{PROGRAM} ended with {done.returncode}").splitlines()[-1])
    return list(json.loads(done.stdout))


def _moved(events: Sequence[Any], kernels: tuple[str, ...]) -> int:
    prefixes = tuple(f"sluice_{name}" for name in kernels)
    return sum(e[6] + e[7] for e in events if e[0] == "launch" and e[3].startswith(prefixes))


def busiest(events: Sequence[Any]) -> int:
    """Returns the first of the ranks that launch most."""
    launches: dict[int, int] = {}
    for event in events:
        launches[event[1]] = launches.get(event[1], 0) + (event[0] == "launch")
    return max(sorted(launches), key=lambda rank: launches[rank])


def count(events: Sequence[Any]) -> Counts:
    """Counts the calls of a step."""
    rank = busiest(events)
    own = [event for event in events if event[1] == rank]
    begin = next((i for i, e in enumerate(own) if e[0] == "mark" and e[2] == "backward"), len(own))
    gemms = [event for event in own if event[0] == "gemm"]

    def number(*kinds: str) -> int:
        return sum(event[0] in kinds for event in own)

    return Counts(
        launches=number("launch"),
        forward_launches=sum(event[0] == "launch" for event in own[:begin]),
        waits=number("host_wait", "host_drain"),
        headers=number("header"),
        event_waits=number("wait"),
        groups=number("messages"),
        grouped_calls=sum(event[3] == "grouped" for event in gemms),
        single_calls=sum(event[3] != "grouped" for event in gemms),
        gemms=sum(len(event[6]) for event in gemms),
        copies=number("copy", "fill"),
        other_calls=number("host_call"),
        row_bytes=_moved(own, ROWS),
        activation_bytes=_moved(own, ACTIVATIONS),
        link_bytes=sum(part[1] for event in own if event[0] == "messages" for part in event[5]),
    )


def priced(prices: Prices, events: Sequence[Any]) -> Result:
    """Simulates the step in virtual time."""
    return Clock(prices, events).run()


def run(name: str, ranks: int, chunks: int, prices: Prices) -> tuple[Step, list[Any]]:
    """Returns the step, and its calls."""
    shape = shape_of(name)
    events = record(shape, ranks, chunks, prices)
    result = priced(prices, events)
    rank = result.ranks[busiest(events)]
    step = Step(
        shape=name,
        ranks=ranks,
        chunks=chunks,
        device=prices.device,
        gemms_by=os.environ.get(GEMMS_BY),
        counts=count(events),
        seconds=result.seconds,
        floor_seconds=shape.floor_seconds(prices),
        by_kind=dict(sorted(rank.alone.items())),
        busy=rank.busy / result.seconds,
        filled=rank.filled / result.seconds,
    )
    return step, events


# ---- the command ----

DOC = "`sluice simulate --device`: counts the GPU calls of one step of a known layer, and prices them by a model."
EXAMPLE = """examples:
  sluice simulate --device h200 --shape qwen3 --ranks 8
  sluice simulate --device h200 --shape mixtral --ranks 1 --json --events calls.json

shapes: one layer's forward and backward in bf16 on 16,384 tokens of each rank, gated experts, random routes; rows are
sent again in backward, pre-activations are kept. mixtral: M 4096, H 14336, E 8, K 2; qwen3: M 2048, H 768, E 128, K 8;
deepseek: M 7168, H 2048, E 256, K 8

No GPU is used. Counts are of the calls that the engine makes on fakes of the driver, cuBLAS and NCCL. Times are a
model's: good for finding what became slower, not results.

exit status: 0; 2 wrong arguments or files
"""


@command.refuses("sluice simulate")
def main(words: list[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = command.parser("sluice simulate --device", DOC, EXAMPLE)
    known = ", ".join(device_prices.names())
    parser.add_argument("--device", required=True, metavar="DEVICE", help=f"{known}, or a file of prices")
    parser.add_argument("--shape", required=True, metavar="SHAPE", help=", ".join(SHAPES))
    parser.add_argument("--ranks", type=int, default=1, metavar="W", help="GPUs of one node that share the experts (1)")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="n (1)")
    parser.add_argument("--events", metavar="FILE.json", help="writes every call of every rank")
    options = command.parsed(parser, words)
    files.check("--events", options.events)
    if options.chunks < 1:
        raise BadInput(f"--chunks is {options.chunks}; it must be above 0")
    prices = device_prices.load(options.device)
    step, events = run(options.shape, options.ranks, options.chunks, prices)
    if options.events:
        lines = ",\n".join(json.dumps(event) for event in events)
        files.write("--events", options.events, f"[\n{lines}\n]\n")
    return command.answer(options.json, step.as_dict, lambda: lines_of(step, prices))


def lines_of(step: Step, prices: Prices) -> list[str]:
    """Returns the lines for a terminal."""
    c, gb, ms = step.counts, 1e-9, 1e3
    kinds = sorted(step.by_kind.items(), key=lambda item: -item[1])
    how = f", by {GEMMS_BY}={step.gemms_by}" if step.gemms_by else ""
    alone = ", ".join(f"{kind} {seconds * ms:.2f}" for kind, seconds in kinds)
    return [
        f"{step.shape} on {step.ranks} {step.device}, n = {step.chunks}: a model, not a measurement",
        "",
        f"  step      {step.seconds * ms:.2f} ms, {step.of_floor:.3f} of its floor of {step.floor_seconds * ms:.2f} ms",
        f"  launches  {c.launches}: {c.forward_launches} forward, {c.launches - c.forward_launches} backward",
        f"  GEMMs     {c.gemms} in {c.grouped_calls} grouped and {c.single_calls} single calls{how}",
        f"  waits     {c.waits} of the host, {c.event_waits} of streams; {c.headers} headers between hosts",
        f"  groups    {c.groups} of NCCL",
        f"  copies    {c.copies}; other calls {c.other_calls}",
        f"  bytes     rows {c.row_bytes * gb:.2f} GB, activations {c.activation_bytes * gb:.2f}, sent"
        f" {c.link_bytes * gb:.2f}",
        f"  SMs       busy {100 * step.filled:.0f} % of the step; something runs {100 * step.busy:.0f} %",
        f"  alone     {alone} ms",
        "",
        "Counts are of the rank that launches most, and what the code does. Times are those of a virtual clock with",
        f"assumed prices ({prices.data.get('provenance', 'of unknown origin')}).",
        "Compare them with times of the same prices; never publish one as a result.",
    ]
