# SPDX-License-Identifier: Apache-2.0
"""`sluice simulate --device`: counts the GPU calls of one step of a known layer, and prices them by a model."""

from __future__ import annotations

import json

from . import command, device_prices, device_step, files
from .errors import BadInput

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
    parser = command.parser("sluice simulate --device", __doc__, EXAMPLE)
    known = ", ".join(device_prices.names())
    parser.add_argument("--device", required=True, metavar="DEVICE", help=f"{known}, or a file of prices")
    parser.add_argument("--shape", required=True, metavar="SHAPE", help=", ".join(device_step.SHAPES))
    parser.add_argument("--ranks", type=int, default=1, metavar="W", help="GPUs of one node that share the experts (1)")
    parser.add_argument("--chunks", type=int, default=1, metavar="N", help="n (1)")
    parser.add_argument("--events", metavar="FILE.json", help="writes every call of every rank")
    parser.add_argument("--json", action="store_true", help="for machines")
    options = parser.parse_args(words)
    files.check("--events", options.events)
    if options.chunks < 1:
        raise BadInput(f"--chunks is {options.chunks}; it must be above 0")
    prices = device_prices.load(options.device)
    step, events = device_step.run(options.shape, options.ranks, options.chunks, prices)
    if options.events:
        lines = ",\n".join(json.dumps(event) for event in events)
        files.write("--events", options.events, f"[\n{lines}\n]\n")
    return command.answer(options.json, step.as_dict, lambda: lines_of(step, prices))


def lines_of(step: device_step.Step, prices: device_prices.Prices) -> list[str]:
    """Returns the lines for a terminal."""
    c, gb, ms = step.counts, 1e-9, 1e3
    kinds = sorted(step.by_kind.items(), key=lambda item: -item[1])
    how = f", by {device_step.GEMMS_BY}={step.gemms_by}" if step.gemms_by else ""
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
