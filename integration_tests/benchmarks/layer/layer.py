"""Measures one MoE layer, forward and backward: Sluice and stock interleaved in one process group on the same data.

    layer --case nodrop-1g            one of the named cases; --all runs all eight
    layer --T 512 --M 256 --H 1024 --E 16 --K 2 --skew 5 --drop --link 0.2gbit --ranks 4 --dtype bfloat16
    layer --smoke                     a tiny layer and one pair: does it run?

One JSON record per case goes to records/ (of --smoke only where --records is given). A record says which machine and
versions made it; the numbers are never checked by a test, only by --check, which compares them with what the named
cases promise.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from integration_tests.benchmarks.layer.cell_runs import Settings, run_cells
from integration_tests.benchmarks.layer.cells import NAMED, Cell
from integration_tests.benchmarks.measuring import quiet, records, sluice_side, stolen
from integration_tests.benchmarks.memory import memory_blocks, memory_marks

SMOKE = Cell("smoke", "none", T=64, M=32, H=64, E=4, K=2)


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a cell of one's own."""
    shape = parser.add_argument_group("a cell of your own")
    for name, default in (("T", 2048), ("M", 1024), ("H", 4096), ("E", 8), ("K", 1)):
        shape.add_argument(f"--{name}", type=int, default=default)
    shape.add_argument("--skew", type=float, default=1.0, help="load of the first expert over the mean")
    shape.add_argument("--routing", metavar="FILE", help="expert loads of a training run (`sluice routing`), replayed")
    shape.add_argument("--routing-layer", type=int, default=0, help="which of its layers (%(default)s)")
    shape.add_argument("--drop", action="store_true", help="capacity 1.25 instead of no dropping")
    shape.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    shape.add_argument("--ranks", type=int, default=2)
    shape.add_argument("--link", default="1gbit", help="1gbit, 0.2gbit ..., or none for loopback")


def replayed(path: str, layer: int, E: int, ranks: int) -> tuple[int, ...]:
    """Loads of the recorded step whose fullest rank is the median of all steps. ValueError says what does not fit."""
    from sluice.planning import routing

    trace = routing.read(path)
    if trace.experts != E:
        raise ValueError(f"routing {path}: recorded with {trace.experts} experts; give --E {trace.experts}")
    if not 0 <= layer < trace.layers:
        raise ValueError(f"routing {path}: it has layers 0 to {trace.layers - 1}; --routing-layer is {layer}")
    if E % ranks != 0:
        raise ValueError(f"routing {path}: {E} experts do not divide over {ranks} ranks; choose --ranks")
    steps = sorted((step[layer] for step in trace.loads), key=lambda loads: routing.skew_of(loads, ranks))
    return tuple(steps[len(steps) // 2])


def summary(record: dict) -> list[str]:
    """Say in a few lines what a record holds."""
    cell, sides, found = record["cell"], record["sides"], record["parts"]
    stock, rates = sides["stock"], record["quiet"]["gflops_before_rounds"]
    lost = record["stolen"]
    comm = max(p["forward_comm"] + p["backward_comm"] for p in record["stock_parts"])
    compute = max(p["forward_compute"] + p["backward_compute"] for p in record["stock_parts"])
    known = f", table {cell['table_stock_s']} s" if cell["table_stock_s"] else ""
    drop = "drop" if cell["drop"] else "no drop"
    lines = [
        f"{cell['name']}  ({record['link']}, W {cell['W']}, T {cell['T']}, M {cell['M']}, H {cell['H']}, "
        f"E {cell['E']}, K {cell['K']}, skew {cell['skew']:g}, {drop}, {cell['dtype']})",
        f"  stock    {stock['wall']['median']:.3f} s  (comm {comm:.2f} + compute {compute:.2f}{known})  "
        f"cpu {stock['cpu']['median']:.2f} s, {len(stock['wall_s'])} pairs; "
        f"machine before them {min(rates):.0f} to {max(rates):.0f} GFLOP/s, "
        f"up to {100 * max(lost['share_of_rounds']):.0f} % of a round stolen, {lost['rounds_repeated']} run again",
        f"  parts    comm {found['comm_per_pass_s']:.3f} s per pass, compute {found['forward_compute_s']:.3f} + "
        f"{found['backward_compute_s']:.3f} s; possible {found['possible_s']:.3f} s = {record['possible']:.2f}x",
    ]
    if "sluice" in sides:
        mine, ratio = sides["sluice"], record["speedup"]
        chunks = max(s["chunks"] for s in record["sluice_stats"])
        lane = max(s["comm_cpu_s"] for s in record["sluice_stats"])
        sent = max(s["bytes_sent"] for s in record["sluice_stats"]) / 1e6
        must = f", must reach {cell['must_reach']}" if cell["must_reach"] else ""
        lines += [
            f"  sluice   {mine['wall']['median']:.3f} s  {ratio['median']:.2f}x "
            f"[{ratio['q1']:.2f} .. {ratio['q3']:.2f}]{must}; "
            f"reached / possible {record['reached_over_possible']:.2f}; cpu {mine['cpu']['median']:.2f} s",
            f"  chunks   {chunks}; one chunk / chosen {record['one_chunk_over_chosen']['median']:.2f}; comm lane "
            f"{lane:.2f} cpu s, {sent:.1f} MB sent; output differs by {record['max_output_difference']:.1e}",
        ]
    if record.get("memory"):
        peaks = {
            s: max(m[s]["peak_bytes"] for m in record["memory"] if s in m) for s in record["memory"][0] if s in sides
        }
        lines.append("  memory   " + ", ".join(f"{side} {peak / 2**20:.1f} MiB" for side, peak in peaks.items()))
        for side in peaks:
            blocks = record["memory"][0][side].get("blocks", [])
            lines += [f"  blocks   of {side} at its peak, rank 0", *memory_blocks.said(blocks)] if blocks else []
    if "memory_over_parts" in record:
        bound = record.get("memory_bound")
        of_bound = "not known" if bound is None else f"{bound['of_bound']:.2f} (at most 1)"
        lines.append(
            f"  settled  peak / (slots + saved) {record['memory_over_parts']:.3f} (at most "
            f"{memory_marks.MOST_OVER_PARTS}); peak / (stock's x real / padded rows) {of_bound}"
        )
    return lines


def promises_kept(record: dict) -> bool:
    """Compare a named case with what it must reach."""
    cell = record["cell"]
    kept = record["speedup"]["median"] >= (cell["must_reach"] or 0)
    pipelined = record["one_chunk_over_chosen"]["median"] >= (cell["must_pipeline"] or 0)
    return kept and pipelined and memory_marks.kept(record)


def main() -> int:
    """Run the chosen cells, print a summary of each and write its record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=[c.name for c in NAMED], help="may be given several times")
    parser.add_argument("--all", action="store_true", help="all named cases")
    shape_arguments(parser)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-seconds", type=float, default=120.0, help="timed seconds per case (at least 5 pairs)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="of the ds_config key")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--blocks", action="store_true", help="also list what is alive at the peak of memory")
    parser.add_argument("--stock-only", action="store_true")
    parser.add_argument("--check", action="store_true", help="fail if a named case falls short")
    parser.add_argument("--records", type=Path, help="folder for the records (records/ beside this file)")
    parser.add_argument("--smoke", action="store_true", help="a tiny layer, one pair, loopback: does it run?")
    quiet.arguments(parser)
    stolen.arguments(parser)
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    folder = args.records or (None if args.smoke else records.FOLDER)
    if args.smoke:
        cells, args.pairs = [SMOKE], 1
    elif args.all or args.case:
        cells = [c for c in NAMED if args.all or c.name in args.case]
    else:
        shape = {name: getattr(args, name) for name in ("T", "M", "H", "E", "K", "skew", "drop", "dtype", "link")}
        try:
            loads = replayed(args.routing, args.routing_layer, args.E, args.ranks) if args.routing else ()
        except ValueError as error:  # BadInput is one
            print(error, file=sys.stderr)
            return 2
        cells = [Cell("replayed" if loads else "custom", W=args.ranks, loads=loads, **shape)]
    why = "" if args.stock_only else sluice_side.missing()
    if why:
        print(f"{why} Use --stock-only to measure stock alone.", file=sys.stderr)
        return 3
    settings = Settings(
        pairs=args.pairs,
        least_pairs=min(5, args.pairs),
        seed=args.seed,
        max_seconds=args.max_seconds,
        memory=not args.no_memory,
        blocks=args.blocks,
        stock_only=args.stock_only,
        verbose=args.verbose,
        quiet_gflops=args.quiet,
        quiet_timeout_s=args.quiet_timeout,
        most_stolen=args.stolen,
        options={key: json.loads(value) for key, _, value in (o.partition("=") for o in args.option)},
    )
    short: list[str] = []

    def on_record(record: dict) -> None:
        print("\n".join(["", *summary(record)]), flush=True)
        if folder is not None:
            kind = "stock-" if args.stock_only else ""
            records.write(folder / f"layer-{kind}{record['cell']['name']}.json", record)
        if not args.stock_only and not promises_kept(record):
            short.append(record["cell"]["name"])

    status = run_cells(cells, settings, on_record)
    if status == 0 and short and args.check:
        print(f"Below what is promised: {', '.join(short)}", file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
