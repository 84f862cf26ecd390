#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small MoE language model under DeepSpeed, stock and with Sluice, over a real link, and compares them.

    quickstart.py [--steps N] [--link 1gbit|200mbit|none] [--json FILE]

Two expert-parallel ranks, each in its own network namespace with its own core. At the end: one table, a picture of both
timelines and a trace for Perfetto in quickstart_out/.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sluice.timeline import Event, Panel, by_op
from sluice.timeline import write as write_panels

from integration_tests.benchmarks.measuring import launch
from integration_tests.benchmarks.measuring.machine import machine
from integration_tests.benchmarks.memory import memory
from integration_tests.net.namespaces import parse_rate

HERE = Path(__file__).resolve().parent
RANKS = 2
STEPS, LEAST_STEPS = 60, 4
TRAIN_S = 190.0  # limit of the training time, unless --steps is given: the whole run then takes less than five minutes
DEADLINE_S, DEADLINE_STEP_S = 900.0, 20.0  # far above the usual duration, so that only a hang reaches them
# Rows of the picture are named by the papers' letters, because stock DeepSpeed has no lanes.
LANES = {"S": "S  dispatch", "C": "C  experts", "R": "R  combine", "M": "M  other"}


def arguments() -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help=f"training steps of each side (default {STEPS})")
    parser.add_argument("--link", default="1gbit", help="1gbit (default), 200mbit, 0.4gbit ..., or none for loopback")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--out", type=Path, default=Path("quickstart_out"), help="folder for picture and trace")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="show everything the ranks print")
    args = parser.parse_args()
    args.train_s = TRAIN_S if args.steps is None else None
    args.steps = STEPS if args.steps is None else args.steps
    if args.steps < LEAST_STEPS:
        parser.error(f"--steps must be at least {LEAST_STEPS}")
    if args.link != "none":
        try:
            parse_rate(args.link)
        except ValueError as why:
            parser.error(str(why))
    try:  # before the training, so that an error is reported at once
        args.out.mkdir(parents=True, exist_ok=True)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.open("a").close()
    except OSError as why:
        parser.error(f"the result cannot be written: {why}; name another place with --json or --out")
    return args


def block_of(steps: int) -> int:
    """The number of steps that a side runs at a time."""
    return max(1, min(6, steps // 4))


def turns(steps: int, block: int) -> list[tuple[str, int]]:
    """A B B A A B B A ... in blocks of at most `block` steps, each side `steps` in all."""
    sizes = [min(block, steps - at) for at in range(0, steps, block)]
    return [(side, size) for at, size in enumerate(sizes) for side in ("AB" if at % 2 == 0 else "BA")]


def plan_of(args: argparse.Namespace) -> dict:
    """Everything the ranks need to know, as they read it."""
    return {
        "turns": turns(args.steps, block_of(args.steps)),
        "train_s": args.train_s,
        "block": block_of(args.steps),
        "seed": args.seed,
        "shape": {"ep_size": RANKS},
        "config": json.loads((HERE / "ds_config.json").read_text()),
        "one_chunk_rounds": 2,
    }


def first_timed_step(chunks: list[int], steps: int, block: int) -> int:
    """The first timed step, the same on both sides: earlier steps count for the loss only.

    In its first block a side allocates and connects. Sluice then tries numbers of chunks as ordinary steps; timed
    are the steps with its choice, or the last quarter of a run that ended before it had chosen.
    """
    changes = [at for at in range(1, len(chunks)) if chunks[at] != chunks[at - 1]]
    return min(max(block, *changes, 0), max(block, steps - max(1, steps // 4)))


def result_of(raw: dict, args: argparse.Namespace, link: str) -> dict:
    """The JSON record: per side loss, median step time, peak bytes; then what compares them."""
    record: dict = {}
    first = first_timed_step(raw["chunks"], len(raw["stock"]["loss"]), block_of(args.steps))
    for side in ("stock", "sluice"):
        step_s = raw[side]["step_s"][first:]
        peaks = [rank[side]["peak_bytes"] for rank in raw["memory"]] if raw["memory"] else None
        record[side] = {
            "loss": raw[side]["loss"],
            "step_ms": statistics.median(step_s) * 1e3,
            "moe_peak_bytes": max(peaks) if peaks else None,
        }
    pairs = zip(raw["stock"]["loss"], raw["sluice"]["loss"], strict=True)
    record["speedup"] = record["stock"]["step_ms"] / record["sluice"]["step_ms"]
    record["max_loss_difference"] = max(abs(a - b) for a, b in pairs)
    record["one_chunk"] = {
        "step_ms": statistics.median(raw["one_chunk"]["one_chunk"]) * 1e3,
        "chosen_step_ms": statistics.median(raw["one_chunk"]["chosen"]) * 1e3,
        "chunks": max(s["last_num_chunks"] for s in raw["sluice_stats"]),
    }
    record["chunks_by_step"] = raw["chunks"]
    if raw["memory"] and "budget" in raw["memory"][0]:
        record["under_budget"] = {
            "memory_budget": raw["memory"][0]["budget"]["budget"],
            # The budget bounds this; the peak below is of all allocations of the layers, including the gate.
            "sluice_peak_bytes": max(rank["budget"]["own_peak_bytes"] for rank in raw["memory"]),
            "moe_peak_bytes": max(rank["budget"]["peak_bytes"] for rank in raw["memory"]),
        }
    record["first_timed_step"] = first
    record.update(link=link, ranks=RANKS, seed=args.seed, machine=machine(), versions=raw["versions"])
    return record


def table(record: dict) -> list[str]:
    """The one table at the end, as lines."""

    def mib(side: dict) -> str:
        return "not measured" if side["moe_peak_bytes"] is None else f"{side['moe_peak_bytes'] / 2**20:.1f} MiB"

    stock, sluice = record["stock"], record["sluice"]
    rows = [("", "stock", "Sluice", "")]

    def row(name: str, of: object, compare: str = "") -> None:
        rows.append((name, of(stock), of(sluice), compare))  # type: ignore[operator]

    def ratio(key: str) -> str:
        return f"{stock[key] / sluice[key]:.2f}x" if stock[key] and sluice[key] else ""

    gap = f"largest difference {record['max_loss_difference']:.1e}"
    row("loss, first step", lambda side: f"{side['loss'][0]:.4f}")
    row("loss, last step", lambda side: f"{side['loss'][-1]:.4f}", gap)
    row("step time, median", lambda side: f"{side['step_ms']:.0f} ms", f"{ratio('step_ms')} as fast")
    one = record["one_chunk"]
    chosen = f"with {one['chunks']}, in turns with these steps: {one['chosen_step_ms']:.0f} ms"
    rows.append(("  with one chunk", "", f"{one['step_ms']:.0f} ms", chosen))
    row("MoE activation memory", mib, f"{ratio('moe_peak_bytes')} less" if ratio("moe_peak_bytes") else "")
    if "under_budget" in record:
        under = record["under_budget"]
        name = f"  with memory_budget {under['memory_budget'] / 2**20:.1f} MiB"
        rows.append((name, "", mib(under), f"{stock['moe_peak_bytes'] / under['moe_peak_bytes']:.2f}x less"))
        own, bound = (under[key] / 2**20 for key in ("sluice_peak_bytes", "memory_budget"))
        rows.append(("    of it Sluice's own", "", f"{own:.1f} MiB", f"the budget of {bound:.1f} MiB bounds this"))
    widths = [max(len(r[c]) for r in rows) for c in range(4)]
    lines = ["  ".join(cell.ljust(widths[c]) for c, cell in enumerate(r)).rstrip() for r in rows]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def panel(side: str, recorded: list[dict]) -> Panel:
    """The timeline of one side of the comparison."""
    events = [
        Event(
            op=e["op"],
            lane=e["op"][:1].upper() if e["op"][:1].upper() in LANES else "M",
            begin=e["begin_ns"] / 1e9,
            end=e["end_ns"] / 1e9,
            chunk=e["chunk"],
            direction=e["direction"],
            layer=e["layer"],
            rank=e["rank"],
            label=e.get("name", ""),
        )
        for e in recorded
    ]
    begin, end = Panel(side, events, LANES).span()
    title = f"{side}: {(end - begin) * 1e3:.0f} ms from the first to the last MoE operation of a step"
    if side != "stock":
        title += f", {1 + max(e['chunk'] for e in recorded)} chunks"
    return Panel(title, events, LANES)


def main() -> int:
    """Run the ranks, then print the table and write the files."""
    args = arguments()
    progress = launch.Progress()
    try:
        importlib.import_module("sluice.adapters.deepspeed")
    except Exception as why:
        said = f"The package sluice is installed but does not load: {type(why).__name__}: {why}"
        print(f"{said} ./quickstart installs it; `python -m sluice doctor` says more.", file=sys.stderr)
        return 3
    shown = ""

    def on_progress(event: dict) -> None:
        nonlocal shown
        head = f"{event['phase']:>9} {launch.bar(event['done'])} {event['done']:4.0%}"
        if event["phase"] == "train":
            head += f"  {event['side']:>6} step {event['step']:3d}"
            head += f"  loss {event['loss']:.3f}  {event['s'] * 1e3:5.0f} ms"
        # If lines cannot be rewritten, this prints at least the beginning and the end of each phase.
        progress.show(head, now=event["phase"] != shown or event["done"] >= 1.0)
        shown = event["phase"]

    with tempfile.TemporaryDirectory() as folder:
        preload, note = memory.build_watch(Path(folder))
        if note:
            progress.line(note)
        raw, link = launch.ask(
            HERE / "quickstart_rank.py",
            plan_of(args),
            world_size=RANKS,
            rate=args.link,
            deadline_s=DEADLINE_S + DEADLINE_STEP_S * args.steps,
            on_progress=on_progress,
            progress=progress,
            preload=preload,
            verbose=args.verbose,
        )
    record = result_of(raw, args, link)
    timelines = {side: [e for rank in raw["events"] for e in rank.get(side, [])] for side in ("stock", "sluice")}
    title = f"MoE operations of one training step, {RANKS} ranks, link {link}"
    panels = [panel(side, recorded) for side, recorded in timelines.items() if recorded]
    written = write_panels(panels, args.out, title, by_op)
    (args.out / "result.json").write_text(json.dumps(record, indent=1) + "\n")
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    progress.line("")
    if len(record["stock"]["loss"]) < args.steps:
        progress.line(f"Stopped after {len(record['stock']['loss'])} steps to stay below five minutes.")
    for line in table(record):
        progress.line(line)
    progress.line("")
    progress.line(f"Link: {link}. Pictures and data: {args.out}/{{{', '.join([*written, 'result.json'])}}}")
    progress.line("Open trace.json at ui.perfetto.dev.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
