"""Runs cells: groups them by ranks and link, starts the ranks of each group once, and collects the records."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from integration_tests.benchmarks.layer.cells import Cell
from integration_tests.benchmarks.measuring import launch
from integration_tests.benchmarks.memory import memory

HERE = Path(__file__).resolve().parent


@dataclass
class Settings:
    """How to measure, the same for all cells of a run."""

    pairs: int = 10
    least_pairs: int = 5
    warm_up: int = 2
    seed: int = 1
    max_seconds: float = 120.0  # of timed steps per cell; after it no more than `least_pairs` are made
    quiet_gflops: float = 0.0  # see quiet.py; 0: rounds wait for nothing
    quiet_timeout_s: float = 120.0  # of waiting for quiet per cell, and of running spoiled rounds again
    most_stolen: float = 1.0  # see stolen.py; 1: no round is run again
    memory: bool = True
    blocks: bool = False  # what is alive at the peak of memory, by size and caller; the passes watched take longer
    one_chunk: bool = True  # a third side: Sluice with one chunk
    stock_only: bool = False
    verbose: bool = False
    options: dict[str, object] = field(default_factory=dict)  # of the ds_config key


def run_cells(cells: Sequence[Cell], settings: Settings, on_record: Callable[[dict], None]) -> int:
    """Measure all cells; 0, or the status of the first group that failed."""
    progress = launch.Progress()
    groups: dict[tuple[int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.W, cell.link), []).append(cell)
    finished = 0
    for (world, link), members in groups.items():
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            preload, note = memory.build_watch(work) if settings.memory else (None, "")
            if note:
                progress.line(note)
            plan = {**vars(settings), "cells": [c.as_dict() for c in members], "link": link, "out": folder}
            (work / "plan.json").write_text(json.dumps(plan))

            def on_progress(event: dict, before: int = finished, work: Path = work) -> None:
                if "finished" in event:
                    on_record(json.loads((work / f"{event['cell']}.json").read_text()))
                    return
                last = "  ".join(f"{side} {walls[-1]:.3f} s" for side, walls in event["walls"].items() if walls)
                at = f"cell {before + event['number'] + 1} of {len(cells)}  {event['cell']:<20}"
                head = f"{at} {launch.bar(event['done'] / event['of'])}"
                progress.show(f"{head} {event['done']}/{event['of']}  {last}")

            outcome = launch.run(
                [sys.executable, str(HERE / "layer_rank.py"), str(work / "plan.json")],
                world_size=world,
                rate=link,
                deadline_s=300 + len(members) * (300 + 10 * settings.max_seconds),
                on_progress=on_progress,
                progress=progress,
                env=launch.environment(preload),
                verbose=settings.verbose,
            )
        if outcome.status != 0:
            return outcome.status
        finished += len(members)
    return 0
