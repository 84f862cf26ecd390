# SPDX-License-Identifier: Apache-2.0
"""Whole training steps of the example's language model, stock and Sluice in turns in one process group.

The time of a step includes attention, gate, experts, gradient reduction and optimizer.
"""

import json
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import LINK, RANKS, Bench, Option, pairs

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parents[2] / "examples" / "text_lm" / "ds_config.json"
PAGE = "benchmarks/training.md"
OPTIONS = {
    "layers": Option(3),
    "width": Option(256),
    "hidden": Option(1024),
    "experts": Option(8),
    "top_k": Option(1),
    "batch": Option(16),
    "no_drop": Option(False, "no capacity: no token is dropped"),
    "dtype": Option("float32", choices=("float32", "bfloat16")),
    "zero": Option(0, "stage of ZeRO", choices=(0, 1, 2)),
    "ranks": RANKS,
    "link": LINK,
    "pairs": pairs(20),
    "warm_up": Option(3, "steps that do not count"),
    "seed": Option(1, "of data and weights"),
    "option": Option([], "KEY=JSON of the ds_config key"),
}
SMOKE = {"layers": 1, "width": 32, "hidden": 64, "experts": 4, "batch": 2, "pairs": 1, "warm_up": 1, "link": "none"}


def plan_of(options: Any) -> dict[str, Any]:
    """The plan for the ranks."""
    config = json.loads(CONFIG.read_text())
    config["train_micro_batch_size_per_gpu"] = options.batch
    config["sluice"].update((key, json.loads(value)) for key, _, value in (o.partition("=") for o in options.option))
    if options.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if options.zero:
        config["zero_optimization"] = {"stage": options.zero, "reduce_scatter": True, "contiguous_gradients": True}
    shape = {name: getattr(options, name) for name in ("layers", "width", "hidden", "experts", "top_k")}
    shape |= {"ep_size": options.ranks, "drop_tokens": not options.no_drop}
    keep = ("dtype", "seed", "link", "ranks", "pairs", "warm_up")
    return {"shape": shape, "config": config, **{name: getattr(options, name) for name in keep}}


def run(bench: Bench) -> list[str]:
    options = bench.options
    found = bench.ask(HERE / "train_rank.py", plan_of(options), ranks=options.ranks, link=options.link, title="train")
    row: dict[str, Any] = {f"{side}_s": found[side]["wall"]["median"] for side in ("stock", "sluice")}
    row |= {f"{side}_cpu_s": found[side]["cpu"]["median"] for side in ("stock", "sluice")}
    row |= {name: found[name] for name in ("speedup", "max_loss_difference")}
    bench.tell(row)
    bench.keep([row], found)
    return []


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(run: dict[str, Any]) -> list[str]:
        (row,) = records.rows_of(run)
        walls = [f"{1e3 * row[f'{side}_s']:.0f} ms" for side in ("stock", "sluice")]
        cpu = ", ".join(f"{row[f'{side}_cpu_s']:.2f}" for side in ("stock", "sluice"))
        difference = f"{row['max_loss_difference']:.1e}"
        return [f"`{run['command']}`", *walls, pages.spread(row["speedup"]), f"{cpu} s", difference]

    heads = ["command", "stock", "Sluice", "speed-up", "CPU, both ranks", "losses differ by"]
    return {"steps": f"{pages.made(runs)}\n\n{pages.table(heads, map(cells, runs))}"}
