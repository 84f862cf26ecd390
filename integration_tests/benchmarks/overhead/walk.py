"""What binding and walking the template take of a step, waits and thread wake-ups apart.

    .venv/bin/python -m integration_tests.benchmarks.walk [--chunks 8] [--link none] [--records FOLDER] [--check]

One layer of the grid's smallest cell, forward and backward, n = 8, everything kept. The library counts CPU time of the
calling thread beside its ops while a trace is kept (`sluice_context_stats_t`, num_walks and behind), so blocks of steps
with a trace and without take turns: bind and walk are of the first, the step that they are a share of of the second,
and the difference is what looking costs. Of the ranks, the one with the larger sum counts.

bind        routes, offsets, slots: CPU time, without the ranks' handshake and the host's save callback
walk        submitting, ordering and recording the ops: CPU time, without the ops, the waits and waking other threads
instrument  readings of the thread's clock within bind and walk, N of them at c ns each: about runs as they took, others
            at what one took at the trace's begin. They are in the sums that the library counts and in no step without
            a trace, so that the share is without them; the share with them stands beside
waits       time that the calling thread waited for other lanes; wake-ups: of all lanes' threads, with their CPU time
            and that of the calling thread for waking others, one system call each
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from integration_tests.benchmarks.layer.grid_cells import CELLS  # noqa: E402
from integration_tests.benchmarks.measuring import launch, records  # noqa: E402

PROMISED = 0.005  # of a step


def smallest() -> dict[str, int]:
    """The shape of the grid's cell with the fewest operations on two ranks."""
    cell = min((cell for cell in CELLS if cell.W == 2), key=lambda cell: cell.T * cell.K * cell.M * cell.H)
    return {name: getattr(cell, name) for name in "TMHEK"}


def judge(found: dict[str, Any]) -> dict[str, float]:
    """Milliseconds of a step, and the share. found["ranks"]: of each rank, sums over the steps with a trace."""
    steps = found["traced_steps"]
    per_step = [{name: value / steps for name, value in rank.items()} for rank in found["ranks"]]
    worst = max(per_step, key=lambda rank: rank["bind_cpu_ns"] + rank["walk_cpu_ns"] - rank["readings_cpu_ns"])
    step = statistics.median(found["seconds"])
    counted = worst["bind_cpu_ns"] + worst["walk_cpu_ns"]
    return {
        "step_ms": 1e3 * step,
        "traced_step_ms": 1e3 * statistics.median(found["traced_seconds"]),
        "bind_ms": worst["bind_cpu_ns"] / 1e6,
        "walk_ms": worst["walk_cpu_ns"] / 1e6,
        "wait_ms": worst["wait_ns"] / 1e6,
        "wakes": worst["num_wakes"],
        "wake_cpu_ms": worst["wake_cpu_ns"] / 1e6,
        "readings": worst["num_readings"],
        "readings_ms": worst["readings_cpu_ns"] / 1e6,
        "share": (counted - worst["readings_cpu_ns"]) / 1e9 / step,
        "share_with_readings": counted / 1e9 / step,
    }


def show(judged: dict[str, float]) -> str:
    """Three lines."""
    j = judged
    each = 1e6 * j["readings_ms"] / max(j["readings"], 1)
    return (
        f"bind {1e3 * j['bind_ms']:.0f} us + walk {1e3 * j['walk_ms']:.0f} us "
        f"- instrument {1e3 * j['readings_ms']:.0f} us of a step of {j['step_ms']:.2f} ms: {100 * j['share']:.2f} % "
        f"(wanted: {100 * PROMISED:g} %)\n"
        f"instrument: clock readings {j['readings']:.0f} x {each:.0f} ns; "
        f"with them {100 * j['share_with_readings']:.2f} %\n"
        f"apart: waits {j['wait_ms']:.2f} ms; {j['wakes']:.0f} wake-ups with {1e3 * j['wake_cpu_ms']:.0f} us of CPU "
        f"time; the step with a trace {j['traced_step_ms']:.2f} ms"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, value in smallest().items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=20, help="with a trace, and as many without")
    parser.add_argument("--steps", type=int, default=10, help="of a block")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="none")
    parser.add_argument("--gemm", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--records", type=Path, help="folder for walk.json")
    parser.add_argument("--check", action="store_true", help="fail where bind and walk are above 0.5 %% of a step")
    options = parser.parse_args()
    names = ("T", "M", "H", "E", "K", "chunks", "blocks", "steps", "gemm", "seed")
    plan = {name: getattr(options, name) for name in names}
    found, link = launch.ask(
        HERE / "walk_rank.py",
        plan,
        world_size=options.ranks,
        rate=options.link,
        deadline_s=600,
        progress=launch.Progress(),
        unit="blocks",
    )
    judged = judge(found)
    print(show(judged))
    if options.records:
        records.write(options.records / "walk.json", {"plan": plan, "link": link, "judged": judged, **found})
    return 1 if options.check and judged["share"] > PROMISED else 0


if __name__ == "__main__":
    sys.exit(main())
