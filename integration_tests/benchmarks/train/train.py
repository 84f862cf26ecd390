"""Measures whole training steps of the example's language model: stock and Sluice in turns in one process group.

    train --link 0.2gbit --pairs 20 --top-k 2 --zero 1
    train --smoke                     a tiny model and one pair: does it run?

Everything a step does is in its time: attention, gate, experts, gradient reduction, optimizer. One JSON record per run
(of --smoke only where --records is given).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))

from integration_tests.benchmarks.measuring import launch, records, sluice_side  # noqa: E402

HERE = Path(__file__).resolve().parent
SMOKE = {"layers": 1, "width": 32, "hidden": 64, "experts": 4, "batch": 2, "pairs": 1, "warm_up": 1, "link": "none"}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("layers", 3), ("width", 256), ("hidden", 1024), ("experts", 8), ("top-k", 1), ("batch", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--no-drop", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--ep-size", type=int, help="default: all ranks")
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], metavar="KEY=JSON", help="of the ds_config key")
    parser.add_argument("--stock-only", action="store_true")
    parser.add_argument("--records", type=Path, help="folder for the record (records/ beside this file)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, one pair, loopback: does it run?")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    if args.smoke:
        vars(args).update(SMOKE)
    else:
        args.records = args.records or records.FOLDER
    return args


def plan_of(args: argparse.Namespace, out: str) -> dict:
    """Everything the ranks need to know."""
    config = json.loads((ROOT / "examples" / "text_lm" / "ds_config.json").read_text())
    config["train_micro_batch_size_per_gpu"] = args.batch
    config["sluice"].update((key, json.loads(value)) for key, _, value in (o.partition("=") for o in args.option))
    if args.dtype == "bfloat16":
        config["bf16"] = {"enabled": True}
    if args.zero:
        config["zero_optimization"] = {"stage": args.zero, "reduce_scatter": True, "contiguous_gradients": True}
    shape = {
        "layers": args.layers,
        "width": args.width,
        "hidden": args.hidden,
        "experts": args.experts,
        "top_k": args.top_k,
        "ep_size": args.ep_size or args.ranks,
        "drop_tokens": not args.no_drop,
    }
    keep = ("dtype", "seed", "link", "ranks", "pairs", "warm_up", "stock_only")
    return {"shape": shape, "config": config, "out": out, **{name: getattr(args, name) for name in keep}}


def main() -> int:
    """Run the ranks, print the summary, write the record."""
    args = arguments()
    why = "" if args.stock_only else sluice_side.missing()
    if why:
        print(f"{why} Use --stock-only to measure stock alone.", file=sys.stderr)
        return 3
    progress = launch.Progress()

    def on_progress(event: dict) -> None:
        last = "  ".join(f"{s} {event['last'][s]:.3f} s loss {event['losses'][s]:.4f}" for s in event["last"])
        progress.show(f"train {launch.bar(event['done'] / event['of'])} {event['done']}/{event['of']}  {last}")

    with tempfile.TemporaryDirectory() as folder:
        plan_file = Path(folder) / "plan.json"
        plan_file.write_text(json.dumps(plan_of(args, folder)))
        outcome = launch.run(
            [sys.executable, str(HERE / "train_rank.py"), str(plan_file)],
            world_size=args.ranks,
            rate=args.link,
            deadline_s=300 + 60 * (args.pairs + args.warm_up),
            on_progress=on_progress,
            progress=progress,
            env=launch.environment(),
            verbose=args.verbose,
        )
        if outcome.status != 0:
            return outcome.status
        record = json.loads((Path(folder) / "record.json").read_text())
    record["link"] = outcome.link
    side = "stock-" if args.stock_only else ""
    name = f"train-{side}w{args.ranks}-{args.link}-k{args.top_k}-{args.dtype}-zero{args.zero}"
    if args.records is not None:
        records.write(args.records / f"{name}.json", record)
    progress.line("")
    for side, figures in record["sides"].items():
        wall, cpu = figures["wall"], figures["cpu"]["median"]
        progress.line(
            f"{side:>6}  step {wall['median'] * 1e3:.0f} ms [{wall['q1'] * 1e3:.0f} .. {wall['q3'] * 1e3:.0f}]  "
            f"cpu {cpu:.2f} s  loss {figures['loss'][0]:.4f} -> {figures['loss'][-1]:.4f}"
        )
    if "speedup" in record:
        ratio = record["speedup"]
        progress.line(
            f"speed-up {ratio['median']:.2f}x [{ratio['q1']:.2f} .. {ratio['q3']:.2f}], "
            f"losses differ by at most {record['max_loss_difference']:.1e}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
