"""What of a step in a layer's record is possible, and what holds the rest: a table of the committed records.

    .venv/bin/python -m integration_tests.benchmarks.layer_shares [RECORD ...]

*Possible* is the sum over both passes of max(communication, computation), each alone on real rows (parts.py). *Charged*
adds to computation what the communication lane takes of the rank's one core, since both run on it. The rest is told
apart by processor seconds of a rank, averaged over ranks: the experts alone, the lane, what Sluice takes with its n
beyond one chunk, all else of one chunk (gate, routing, packing, autograd, the system's part of the network), and idle.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parents[1] / "records"


def charged_s(parts: dict[str, Any], lane_cpu_s: float) -> float:
    """Seconds of a step in which computation and the lane's own processor time share a core. lane_cpu_s: of both."""
    comm = parts["comm_per_pass_s"]
    return sum(max(comm, parts[f"{name}_compute_s"] + lane_cpu_s / 2) for name in ("forward", "backward"))


def _median(side: Any) -> float:
    return float(side["median"] if isinstance(side, dict) else side)


def shares(record: dict[str, Any]) -> dict[str, float]:
    """Shares of Sluice's step: possible and charged; then experts to idle, which add up to 1 where no rank has more to
    compute than the others."""
    parts, sides, stats = record["parts"], record["sides"], record["sluice_stats"]
    wall, ranks = _median(sides["sluice"]["wall"]), len(stats)
    cpu, one = (_median(sides[name]["cpu"]) / ranks for name in ("sluice", "one_chunk"))
    lane = sum(each["comm_cpu_s"] for each in stats) / ranks
    experts = (parts["forward_compute_s"] + parts["backward_compute_s"]) * _mean_rows(parts["rows_received"])
    return {
        "possible": parts["possible_s"] / wall,
        "charged": charged_s(parts, max(each["comm_cpu_s"] for each in stats)) / wall,
        "experts": experts / wall,
        "lane": lane / wall,
        "chunks": (cpu - one) / wall,
        "else": (one - experts - lane) / wall,
        "idle": (wall - cpu) / wall,
    }


def _mean_rows(received: list[int]) -> float:
    """Rows of a rank on average over those of the fullest, whose computation is the one that was measured."""
    return sum(received) / len(received) / max(received)


def main() -> int:
    """Print the table."""
    paths = [Path(name) for name in sys.argv[1:]] or sorted(RECORDS.glob("layer-*.json"))
    columns: list[str] = []
    for path in paths:
        found = shares(json.loads(path.read_text()))
        if not columns:
            columns = list(found)
            print("| case | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
        words = " | ".join(f"{100 * value:.0f} %" for value in found.values())
        print(f"| {path.stem.removeprefix('layer-')} | {words} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
