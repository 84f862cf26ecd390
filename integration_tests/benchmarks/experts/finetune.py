# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning one experts block: adapters and experts in MXFP4, against frozen dense experts and against PEFT.

Each side runs in its own process, and the sides take turns. The result is the median over rounds of the ratio of two
sides in the same round. A step is a forward and a backward to the tokens and the trained parameters, without an
optimizer. Every expert has the same number of rows.

  frozen   Sluice; the weights are not trained
  lora     Sluice; PEFT's `target_parameters` on both stacks
  stock    the same adapters on transformers' `grouped_mm`
  packed   Sluice; frozen weights in MXFP4
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration_tests.benchmarks.experts.experts_block import SHAPES
from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.measuring.stats import pair_ratios

OPTIONS = {
    "shape": Option("qwen3", choices=list(SHAPES)),
    "experts": Option(0, "of the block; 0: those of the shape. Rows of each expert stay the same"),
    "tokens": Option(512, "of a step with adapters, for all experts of the shape"),
    "rank": Option(16, "of A and B"),
    "dtypes": Option(["float32", "bfloat16"]),
    "threads": Option(1, "with 1, the CPU time of a process counts, else the clock's"),
    "steps": Option(5, "that count in a process, after two that do not"),
    "rounds": Option(3, "in which each side runs once"),
}
SMOKE = {"shape": "smoke", "tokens": 32, "rank": 4, "steps": 1, "rounds": 1}
SIDES = ("frozen", "lora", "stock", "packed")
# Each mark: the sentence, two times whose ratio is measured, and the limit. rows_N is a step with N rows per expert.
MARKS = (
    ("a LoRA step takes {:.2f} of a step with frozen experts", ("lora", "step"), ("frozen", "step"), "<=", 1.15),
    ("PEFT on `grouped_mm` takes {:.2f} of the LoRA step", ("stock", "step"), ("lora", "step"), ">=", 2.0),
    ("MXFP4 takes {:.2f} of dense, 64 rows per expert", ("packed", "rows_64"), ("frozen", "rows_64"), "<=", 1.05),
    ("MXFP4 takes {:.2f} of dense, 8 rows per expert", ("packed", "rows_8"), ("frozen", "rows_8"), "", 0.0),
    ("MXFP4 takes {:.2f} of dense, 1 row per expert", ("packed", "rows_1"), ("frozen", "rows_1"), "<=", 0.6),
)
F32_ALONE = 0.6  # the mark for one row per expert (generation), which only float32 must meet


def run(bench: Bench) -> list[str]:
    """Measures every side of each dtype in turns; returns the missed marks."""
    options, rows, missed = bench.options, [], []
    program = Path(__file__).with_name("finetune_rank.py")
    for dtype in options.dtypes:
        plan = {**bench.picked("shape", "experts", "tokens", "rank", "threads", "steps"), "dtype": dtype}
        times: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(options.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                found = bench.ask(program, {**plan, "side": side}, ranks=1, link="none", title=f"{dtype} {side}")
                times[side].append(found)
        for text, (top, what), (bottom, _), sign, mark in MARKS:
            ratio = pair_ratios([each[what] for each in times[top]], [each[what] for each in times[bottom]])
            wanted = sign if mark != F32_ALONE or dtype == "float32" else ""
            row = {"dtype": dtype, "text": text, "ratio": ratio, "sign": wanted, "mark": mark}
            rows.append({**row, "top_ms": 1e3 * min(each[what] for each in times[top])})
            bench.line(sentence(row))
            missed += [sentence(row)] if is_missed(row) else []
        bench.keep(rows, times)
    return missed if not options.smoke else []


def is_missed(row: dict[str, Any]) -> bool:
    value = row["ratio"]["median"]
    return bool(row["sign"]) and (value > row["mark"] if row["sign"] == "<=" else value < row["mark"])


def sentence(row: dict[str, Any]) -> str:
    """A mark and the measured ratio."""
    ratio = row["ratio"]
    said = f"{row['dtype']}: {row['text'].format(ratio['median'])} ({ratio['q1']:.2f} to {ratio['q3']:.2f})"
    return f"{said}; wanted {row['sign']} {row['mark']:g}" if row["sign"] else said
