# SPDX-License-Identifier: Apache-2.0
"""Starts rank processes over a link, with the environment that DeepSpeed needs on a CPU, and shows their progress."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from integration_tests.net.link import run_ranks

ROOT = Path(__file__).resolve().parents[3]
MARK = "@progress "  # prefix of a rank's output line with JSON for the launcher


def environment(preload: Path | None = None) -> dict[str, str]:
    """Return the environment of a rank. Values that the caller's environment has already are kept."""
    wanted = {
        "TORCHDYNAMO_DISABLE": "1",  # otherwise Inductor would compile the gate's small helpers in every rank
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(ROOT / ".venv" / "torch_extensions"),
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # c10d warns about addresses without a name, as in a network namespace
        "KINETO_LOG_LEVEL": "5",
    }
    found = {name: os.environ.get(name, value) for name, value in wanted.items()}
    found["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])  # ninja
    found["PYTHONUNBUFFERED"] = "1"
    found["OMP_NUM_THREADS"] = "1"
    if preload is not None:
        found["LD_PRELOAD"] = str(preload)
    return found


def report(**fields: object) -> None:
    """Send progress to the launcher; called by a rank."""
    print(MARK + json.dumps(fields), flush=True)


class Progress:
    """Shows one line that is rewritten on a terminal, or elsewhere prints a line every few seconds."""

    def __init__(self, every_s: float = 5.0) -> None:
        self.terminal = sys.stdout.isatty()
        self.every_s = every_s
        self._last = float("-inf")
        self._width = 0

    def show(self, text: str, now: bool = False) -> None:
        """Show `text` as the present state."""
        if self.terminal:
            sys.stdout.write("\r" + text.ljust(self._width))
            sys.stdout.flush()
            self._width = len(text)
        elif now or time.monotonic() - self._last >= self.every_s:
            print(text, flush=True)
            self._last = time.monotonic()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        if self.terminal and self._width:
            sys.stdout.write("\r" + " " * self._width + "\r")
            self._width = 0
        print(text, flush=True)


def bar(done: float, width: int = 24) -> str:
    """Draw a share in [0, 1] as text."""
    full = round(max(0.0, min(1.0, done)) * width)
    return "█" * full + "·" * (width - full)


def ask(
    program: Path,
    plan: Mapping[str, Any],
    *,
    world_size: int,
    rate: str,
    deadline_s: float,
    progress: Progress,
    title: str = "",
    preload: Path | None = None,
    ranks_per_node: int = 1,
    on_found: Callable[[Any], None] | None = None,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    verbose: bool = False,
) -> tuple[Any, str]:
    """Runs `program` on its own ranks; returns the answer and a description of the link. If a rank fails, this process
    ends as well.

    program      gets the name of a JSON file with the plan, and in "out" the file for the answer (rank.Rank)
    on_found     called with each part of the answer as soon as the ranks have it (Rank.found)
    on_progress  called with each report of progress, instead of showing a bar
    verbose      shows all lines of the ranks, and not only those that begin with [sluice]
    """

    def show(event: dict[str, Any]) -> None:
        numbers = f"{event['done']}/{event['of']}"
        parts = (title, bar(event["done"] / event["of"]), numbers, event.get("name", ""))
        progress.show(" ".join(part for part in parts if part))

    def sink(rank: int, line: str) -> None:
        if line.startswith(MARK):
            event = json.loads(line[len(MARK) :])
            if "found" in event:
                assert on_found is not None
                on_found(event["found"])
            else:
                (on_progress or show)(event)
        elif verbose or line.startswith("[sluice]"):
            progress.line(f"[{rank}] {line}")

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        (Path(folder) / "plan.json").write_text(json.dumps({**plan, "out": str(out)}))
        outcome = run_ranks(
            [sys.executable, str(program), str(Path(folder) / "plan.json")],
            world_size=world_size,
            rate=rate,
            deadline_s=deadline_s,
            env={**environment(preload), "PYTHONPATH": str(ROOT)},
            sink=sink,
            announce=progress.line,
            ranks_per_node=ranks_per_node,
        )
        if outcome.status != 0:
            progress.line(f"Failed: {outcome.reason}. Last lines:")
            for rank, tail in outcome.tails.items():
                for text in tail:
                    if not text.startswith(MARK):
                        progress.line(f"  [{rank}] {text}")
            raise SystemExit(outcome.status)
        return json.loads(out.read_text()), outcome.link
