# SPDX-License-Identifier: Apache-2.0
"""The part of the possible overlap that Sluice reaches if communication takes about as long as computation.

Two layers run in turns: one with one chunk, whose ops give the separate times of communication and computation, and one
whose n Sluice chooses during training. From both, per pass,

    ideal = sum over forward and backward of max(communication, computation + CPU seconds of the communication lane)

since one core both computes and moves the bytes. Communication is that of the rank that waited least for the others. In
backward it is twice the gradients' dispatch, because the combine overlaps the weight gradients even with one chunk.
Computation is that of the slowest rank. `reached` is the ideal over the time of the passes with the chosen n.
"""

from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import GEMM, SEED, Bench, Option
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles

HERE = Path(__file__).resolve().parent
PAGE = "benchmarks/tuner.md"
# T, M, H, E, K, link, and the share of the ideal that must be reached. Over these links communication takes about as
# long as computation on one core of 60 to 120 GFLOP/s.
CASES: dict[str, tuple[int, int, int, int, int, str, float]] = {
    "one-expert": (8192, 512, 2048, 2, 1, "0.25gbit", 0.92),
    "eight": (2048, 1024, 4096, 8, 1, "0.125gbit", 0.82),
    "smoke": (64, 32, 64, 4, 1, "none", 0.0),
}
OPTIONS = {
    "cases": Option(["one-expert", "eight"], choices=list(CASES)),
    "link": Option(None, "another link than the cases name"),
    "gemm": GEMM,
    "rounds": Option(8),
    "settle": Option(120, "steps in which Sluice may choose n, at most"),
    "seed": SEED,
}
SMOKE = {"cases": ["smoke"], "rounds": 3}


def run(bench: Bench) -> list[str]:
    options, found = bench.options, []
    for name in options.cases:
        *sizes, link, must = CASES[name]
        case = {**dict(zip("TMHEK", sizes, strict=True)), "skew": 1.0}
        plan = {"case": case, **bench.picked("rounds", "settle", "seed", "gemm")}
        one = bench.ask(HERE / "overlap_rank.py", plan, ranks=2, link=options.link or link, title=name)
        one["ideal_s"] = sum(max(p["comm_s"], p["compute_s"] + p["comm_cpu_s"]) for p in one["parts"].values())
        one["reached"] = quartiles([one["ideal_s"] / seconds for seconds in one["chosen_s"]])["median"]
        one["one_chunk_over_chosen"] = pair_ratios(one["one_chunk_s"], one["chosen_s"])["median"]
        sizes_text = ", ".join(f"{letter} {case[letter]}" for letter in "TMHE")
        found.append({"case": sizes_text, "link": options.link or link, "must": must, **one})
        bench.line("; ".join(f"{key} {value}" for key, value in row(found[-1]).items()) + f"; parts {one['parts']}")
        bench.keep([row(each) for each in found], found)
    return [
        f"{x['case']}: {x['reached']:.2f} of the ideal, wanted {x['must']}" for x in found if x["reached"] < x["must"]
    ]


def row(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("case", "link", "ideal_s", "reached", "must", "n", "one_chunk_over_chosen")}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        reached = pages.bold(f"{100 * row['reached']:.0f} %", row["reached"] < row["must"])
        gain = f"{row['one_chunk_over_chosen']:.2f}"
        return [
            row["case"],
            row["link"],
            f"{row['ideal_s']:.3f} s",
            reached,
            f"{100 * row['must']:.0f} %",
            row["n"],
            gain,
        ]

    heads = ["case", "link", "ideal", "reached", "wanted", "n", "one chunk ÷ chosen"]
    return {"cases": pages.run_tables(runs, heads, cells)}
