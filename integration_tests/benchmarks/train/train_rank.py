"""What each rank of the training benchmark does: two engines, step by step in turns, A B A B."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "text_lm")]

from runner import Runner  # noqa: E402

from integration_tests.benchmarks.measuring import sluice_side  # noqa: E402
from integration_tests.benchmarks.measuring.launch import report  # noqa: E402
from integration_tests.benchmarks.measuring.machine import machine, versions  # noqa: E402
from integration_tests.benchmarks.measuring.stats import loss_differences, pair_ratios, quartiles  # noqa: E402


def main() -> None:
    """Train both sides; rank 0 writes the record."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    deepspeed.init_distributed()
    sides = ["stock"] if plan["stock_only"] else ["stock", "sluice"]
    dtype = getattr(torch, plan["dtype"])
    runners = {side: Runner(plan, side == "sluice", dtype) for side in sides}
    for side, runner in runners.items():
        swapped = [sluice_side.is_swapped(layer) for layer in runner.layers()]
        if set(swapped) != {side == "sluice"}:
            raise SystemExit(f"{side}: layers swapped: {swapped}")
    warm, total = plan["warm_up"], plan["warm_up"] + plan["pairs"]
    for count in range(total):
        turn = list(runners.items())
        last = {side: runner.step() for side, runner in (turn if count % 2 == 0 else reversed(turn))}
        if dist.get_rank() == 0:
            losses = {side: runner.losses[-1] for side, runner in runners.items()}
            report(done=count + 1, of=total, last=last, losses=losses)
    record: dict[str, object] = {key: plan[key] for key in ("shape", "config", "dtype", "seed", "ranks")}
    record["sides"] = {
        side: {
            "wall_s": r.step_s[warm:],
            "cpu_s_all_ranks": r.cpu_s[warm:],
            "wall": quartiles(r.step_s[warm:]),
            "cpu": quartiles(r.cpu_s[warm:]),
            "loss": r.losses,
        }
        for side, r in runners.items()
    }
    if "sluice" in runners:
        stock, sluice = runners["stock"], runners["sluice"]
        record["speedup"] = pair_ratios(stock.step_s[warm:], sluice.step_s[warm:])
        record |= loss_differences(stock.losses, sluice.losses)
        record["sluice_stats"] = [sluice_side.stats(layer) for layer in sluice.layers()]
    record.update(machine=machine(), versions=versions())
    if dist.get_rank() == 0:
        (Path(plan["out"]) / "record.json").write_text(json.dumps(record))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
