# SPDX-License-Identifier: Apache-2.0
"""The two-level exchange against the one-level exchange: nodes of two ranks, loopback in a node, a shaped link between.

One layer, forward and backward, in turns: `deduplicate` by rank, by node, and "rank_or_node", in the same group over
the same sockets. The ranks of a node share one link to the other nodes. All sides use the same random routing.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from integration_tests.benchmarks.measuring import pages
from integration_tests.benchmarks.measuring.bench import GEMM, SEED, Bench, Option, links, pairs
from integration_tests.benchmarks.measuring.rank import Rank
from integration_tests.benchmarks.measuring.stats import misses, pair_ratios, quartiles
from integration_tests.benchmarks.measuring.stolen import in_turns
from integration_tests.benchmarks.tuner.tuner_scenario import Choice, Scenario

PAGE = "benchmarks/layer.md"
OPTIONS = {
    "links": links("0.2gbit", "1gbit"),
    "nodes": Option(2),
    "per_node": Option(2, "ranks of each node"),
    **{name: Option(value) for name, value in {"T": 1024, "M": 1024, "H": 512, "E": 32, "K": 8}.items()},
    "pairs": pairs(10),
    "warm_up": Option(40, "turns before that, in which each chooses n, and levels"),
    "gemm": GEMM,
    "seed": SEED,
}
SMOKE = {"T": 64, "M": 32, "H": 32, "E": 8, "K": 2, "links": ["1gbit"], "pairs": 2, "warm_up": 2}
MARKS = {"0.2gbit": 1.25, "1gbit": 0.98}  # least ratio of the time with one level to the time with two
MOST_OF_BEST = 1.03  # largest ratio of the chosen exchange's time to that of the faster exchange


def run(bench: Bench) -> list[str]:
    options, lines = bench.options, []
    for link in options.links:
        plan = {"case": bench.picked(*"TMHEK"), "ranks_per_node": options.per_node}
        plan |= bench.picked("pairs", "warm_up", "seed", "gemm")
        nodes = {"ranks": options.nodes * options.per_node, "ranks_per_node": options.per_node}
        line = bench.ask(Path(__file__), plan, link=link, title=link, **nodes)
        walls = line.pop("wall_s")
        line |= {"link": link, "speedup": pair_ratios(walls["one"], walls["two"])}
        line |= {side: quartiles(walls[side])["median"] for side in ("one", "two", "chosen")}
        line["of_best"] = line["chosen"] / min(line["one"], line["two"])
        bench.tell(line)
        lines.append({**line, "walls": walls})
        bench.keep([row(each) for each in lines], lines)
    if options.smoke:
        (line,) = lines
        return [] if line["between_bytes"]["two"] < line["between_bytes"]["one"] else ["by node sends no less"]
    return [text for each in lines for text in missed(each)]


def missed(line: dict[str, Any]) -> list[str]:
    gain, wanted = line["speedup"]["median"], MARKS.get(line["link"])
    marks = (
        ("x one level", gain, ">=", wanted),
        ("of the better is the chosen", line.get("of_best"), "<=", MOST_OF_BEST),
    )
    return misses(line["link"], marks)


def row(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("link", "one", "two", "n", "speedup", "between_bytes")}


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    def cells(row: dict[str, Any]) -> list[str]:
        sides = [f"{row[side]:.2f} s (n {row['n'][side]})" for side in ("one", "two")]
        sent = " → ".join(f"{row['between_bytes'][side] / 1e6:.1f}" for side in ("one", "two"))
        gain = pages.bold(pages.spread(row["speedup"]), bool(missed(row)))
        return [row["link"], *sides, gain, f"{MARKS.get(row['link'], '')}", f"{sent} MB"]

    heads = ["link between nodes", "by rank", "by node", "speed-up", "wanted", "rows between nodes"]
    return {"links": pages.run_tables(runs, heads, cells)}


# ---- on the ranks ----

SIDES = {"one": True, "two": "node", "chosen": "rank_or_node"}


def copies(rank: Rank, ids: torch.Tensor, groups: int) -> int:
    """The number of token copies that this rank sends to other nodes, if ranks are divided into `groups` groups and
    each group gets a token at most once."""
    owner = ids * groups // rank.plan["case"]["E"]
    own = rank.number // rank.plan["ranks_per_node"]
    sent = 0
    for group in range(groups):
        node = group * rank.world_size // groups // rank.plan["ranks_per_node"]
        sent += int((owner == group).any(1).sum()) if node != own else 0
    return sent


def main() -> None:
    rank = Rank()
    plan = rank.plan
    case = Scenario(plan, {**plan["case"], "skew": 1.0})
    generator = torch.Generator().manual_seed(plan["seed"] + rank.number)
    case.ids = torch.rand(case.ids.shape[0], plan["case"]["E"], generator=generator).topk(plan["case"]["K"]).indices
    known = {"gemm": plan["gemm"], "ranks_per_node": plan["ranks_per_node"]}
    contexts = {side: rank.context(**known) for side in SIDES}
    layers = {
        side: case.layer(contexts[side], Choice(0, wgrad="adaptive"), deduplicate=way) for side, way in SIDES.items()
    }
    for count in range(plan["warm_up"]):
        for side in SIDES:
            case.step(layers[side])
        rank.report(done=count + 1, of=plan["warm_up"], name="choosing")
    walls = in_turns({side: functools.partial(case.step, layer) for side, layer in layers.items()}, plan["pairs"])
    with torch.no_grad():
        outputs = {side: case.forward(layer) for side, layer in layers.items()}
    row = 4 * plan["case"]["M"]
    nodes = rank.world_size // plan["ranks_per_node"]
    rank.leave(
        {
            "wall_s": walls,
            "n": {side: contexts[side].stats()["last_num_chunks"] for side in SIDES},
            # Four exchanges, in each of which a rank is taken to send as many rows.
            "between_bytes": {
                "one": 4 * row * copies(rank, case.ids, rank.world_size),
                "two": 4 * row * copies(rank, case.ids, nodes),
            },
            "difference": float((outputs["one"] - outputs["two"]).abs().max()),
        }
    )


if __name__ == "__main__":
    main()
