# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning one experts block: adapters and experts in MXFP4, against frozen dense experts and against PEFT.

Each side runs in its own process, and the sides take turns. The result is the median over rounds of the ratio of two
sides in the same round. A step is a forward and a backward to the tokens and the trained parameters, without an
optimizer. Every expert has the same number of rows.

With --ranks 2: training steps of a model with expert parallelism and LoRA on attention. Sluice and transformers'
`all_to_all` with `grouped_mm` take turns in one process group. Then Sluice runs alone, with experts in MXFP4 and with
LoRA also on experts.
"""

import tempfile
from pathlib import Path
from typing import Any

from integration_tests.benchmarks.experts.experts_block import SHAPES
from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import LINK, Bench, Option
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

# With several ranks: what each process group trains, in the words of the page, and its sides, which take turns.
GROUPS = {
    "attention": ("LoRA on attention", ("stock", "sluice")),
    "packed": ("the same, experts in MXFP4", ("sluice",)),
    "experts": ("LoRA on attention and experts", ("sluice",)),
}
LEAST_SPEEDUP = 1.5

PAGE = "finetuning.md"
OPTIONS = {
    "shape": Option("qwen3", choices=list(SHAPES)),
    "experts": Option(0, "of the block; 0: those of the shape. Rows of each expert stay the same"),
    "tokens": Option(512, "of a step with adapters, for all experts of the shape; of each rank"),
    "rank": Option(16, "of A and B"),
    "dtypes": Option(["float32", "bfloat16"]),
    "steps": Option(5, "that count in a process, after two that do not"),
    "rounds": Option(3, "in which each side runs once; with several ranks, of two steps"),
    "ranks": Option(1, "one core each"),
    "link": LINK,
    "groups": Option(list(GROUPS), "with several ranks, what is trained", choices=list(GROUPS)),
    "layers": Option(1, "with several ranks, of the model"),
    "vocabulary": Option(3200, "with several ranks; as large a share of one layer as of Qwen3-30B-A3B"),
    "deduplicate": Option(False, "with several ranks, Sluice sends a token once to each rank"),
}
SMOKE = {"shape": "smoke", "tokens": 32, "rank": 4, "steps": 1, "rounds": 1, "link": "none", "vocabulary": 64}
SIDES = ("frozen", "lora", "stock", "packed")  # stock: adapters on `grouped_mm`; packed: frozen, in MXFP4
# Each mark: the ratio, the two times that it divides, and the limit. rows_N is a step with N rows per expert.
MARKS = (
    ("LoRA step ÷ frozen step", ("lora", "step"), ("frozen", "step"), "<=", 1.15),
    ("PEFT on `grouped_mm` ÷ LoRA step", ("stock", "step"), ("lora", "step"), ">=", 2.0),
    ("MXFP4 ÷ dense, 64 rows per expert", ("packed", "rows_64"), ("frozen", "rows_64"), "<=", 1.05),
    ("MXFP4 ÷ dense, 8 rows", ("packed", "rows_8"), ("frozen", "rows_8"), "", 0.0),
    ("MXFP4 ÷ dense, 1 row", ("packed", "rows_1"), ("frozen", "rows_1"), "<=", 0.6),
)
F32_ALONE = 0.6  # the mark for one row per expert (generation), which only float32 must meet


def run(bench: Bench) -> list[str]:
    """Measures every side of each dtype in turns; returns the missed marks."""
    if bench.options.ranks > 1:
        return run_ranks(bench)
    options, rows, missed = bench.options, [], []
    program = Path(__file__).with_name("finetune_rank.py")
    for dtype in options.dtypes:
        plan = {**bench.picked("shape", "experts", "tokens", "rank", "steps"), "dtype": dtype}
        times: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for number in range(options.rounds):
            for side in SIDES if number % 2 == 0 else reversed(SIDES):
                found = bench.ask(program, {**plan, "side": side}, ranks=1, link="none", title=f"{dtype} {side}")
                times[side].append(found)
        for text, (top, name), (bottom, _), sign, mark in MARKS:
            ratio = pair_ratios([each[name] for each in times[top]], [each[name] for each in times[bottom]])
            wanted = sign if mark != F32_ALONE or dtype == "float32" else ""
            row = {"dtype": dtype, "what": text, "ratio": ratio, "sign": wanted, "mark": mark}
            rows.append({**row, "top_ms": 1e3 * min(each[name] for each in times[top])})
            bench.tell(rows[-1])
            missed += [records.told(row)] if is_missed(row) else []
        bench.keep(rows, times)
    return missed if not options.smoke else []


def is_missed(row: dict[str, Any]) -> bool:
    value = row["ratio"]["median"]
    return bool(row["sign"]) and (value > row["mark"] if row["sign"] == "<=" else value < row["mark"])


def run_ranks(bench: Bench) -> list[str]:
    """Runs each group in each dtype. Returns a line for each speedup that is below LEAST_SPEEDUP."""
    options, rows, raw, missed = bench.options, [], [], []
    names = ("shape", "layers", "vocabulary", "tokens", "rank", "rounds", "deduplicate")
    with tempfile.TemporaryDirectory() as folder:
        for dtype in options.dtypes:
            for group in options.groups:
                what, sides = GROUPS[group]
                plan = {**bench.picked(*names), "dtype": dtype, "group": group, "sides": sides, "folder": folder}
                program = Path(__file__).with_name("finetune_ep_rank.py")
                found = bench.ask(program, plan, ranks=options.ranks, link=options.link, title=f"{dtype} {group}")
                raw.append(found)
                for side in sides:
                    mine, stock = found["sides"][side], found["sides"].get("stock")
                    seconds = quartiles(mine["seconds"])
                    row = {"dtype": dtype, "what": what, "side": side, "step_s": seconds["median"]}
                    row["tokens_per_s"] = options.ranks * options.tokens / seconds["median"]
                    row["cpu_s"] = quartiles(mine["cpu_s"])["median"]
                    row["sent_mb"] = quartiles(mine["bytes"])["median"] / 1e6
                    if side == "sluice":
                        row["chunks"] = found["chunks"]
                        if stock:
                            row["speedup"] = pair_ratios(stock["seconds"], mine["seconds"])
                            row["difference"] = found["difference"]
                    rows.append(row)
                    bench.tell(row)
                    if "speedup" in row and row["speedup"]["median"] < LEAST_SPEEDUP:
                        missed.append(f"{records.told(row)}; wanted a speedup of {LEAST_SPEEDUP}")
                bench.keep(rows, raw)
    return missed if not options.smoke else []


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """The tables of one block, and of training steps on several ranks; missed targets in bold."""

    def cells(row: dict[str, Any]) -> list[str]:
        gain = row.get("speedup")
        said = pages.bold(pages.spread(gain), gain["median"] < LEAST_SPEEDUP) if gain else ""
        side = {"stock": "`all_to_all`, `grouped_mm`", "sluice": "Sluice"}[row["side"]]
        numbers = f"{row['step_s']:.2f} s", f"{row['cpu_s']:.2f} s", f"{row['tokens_per_s']:.0f}"
        return [row["dtype"], row["what"], side, *numbers, f"{row['sent_mb']:.1f} MB", said]

    heads = ["dtype", "trained", "experts", "step", "CPU", "tokens/s", "a rank sends", "of stock's tokens/s"]
    found = [run for run in runs if "sent_mb" in run["columns"]]
    blocks = pages.each_run((run for run in runs if "ratio" in run["columns"]), block_table)
    return {"block": blocks, "ranks": pages.run_tables(found, heads, cells)}


def block_table(rows: list[dict[str, Any]]) -> str:
    """A line for each ratio, a column for each dtype."""
    found = {(row["what"], row["dtype"]): row for row in rows}
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    lines = []
    for what in dict.fromkeys(row["what"] for row in rows):
        among = [found[what, dtype] for dtype in dtypes]
        judged = [row for row in among if row["sign"]]
        wanted = "".join({"<=": "at most ", ">=": "at least "}[row["sign"]] + f"{row['mark']:g}" for row in judged[:1])
        if judged and len(judged) < len(among):
            wanted += " in " + ", ".join(row["dtype"] for row in judged)
        lines.append([what, *(pages.bold(pages.spread(row["ratio"]), is_missed(row)) for row in among), wanted])
    return pages.table(["ratio", *dtypes, "wanted"], lines)
