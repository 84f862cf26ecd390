"""Bytes and step time of every restore policy at several n, beside the papers' bounds and stock DeepSpeed.

One layer, forward and backward, all cases in turns in one process group over one link. Routing is balanced to the row.
Stock is DeepSpeed's layer of the same shape without dropping, with and without activation checkpointing; its peak is
what it took from malloc (memory.py). Bytes of Sluice are its allocator's (`sluice_context_get_stats`), of rank 0:

    saved    what outlives forward (offloaded rows included: on a CPU the host pool is memory)
    slots    temporaries of forward / of backward
    peak     the high-water mark of everything
    of bound what of the paper's saving a step reaches: (2 (2 B M + B H) - held) / (2 delta)

2 (2 B M + B H) is the paper's pipeline without reuse, in bytes: T_DI, T_DO, T_M and their gradients, all of them
whole (MPipeMoE eq. 4, less the host's tokens). Delta is eq. 5, second line, as printed. `held` is what the allocator
counted on the device at once, the larger of forward and backward: saved rows without offloaded ones, and slots.
Weight gradients are left open, as a user leaves them who names a policy.

What it must show (--check): at n = 2, 4, 8 at least 99 % of the bound under S1 to S4; and some policy that takes at
least 60 % less than `none` of the same n in at most 1.05 times its step, by recomputing and sending again alone. For
that these policies run directly beside `none` in pairs (--pairs), since rounds of all cases take half a minute.

Below the table: eq. 6 as printed beside the true peak, and a model of four layers of one context under a stated budget
(--budget), which --check wants kept. --hot runs one layer under a budget instead, with one expert that gets so many
times the rows of each other expert, or all rows.

The link: recomputing hides where exchanges bound the backward, so 0.1gbit for the default shape (the sim device says
1.00 at n = 8 and 16 there, 1.11 at 0.2gbit, where weight gradients and recomputation together pass the exchanges).
Sending T_DI again is half a backward's exchanges more and hides only where computation bounds it: no link hides both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2]))

from sluice import config  # noqa: E402
from sluice._library import load  # noqa: E402

from integration_tests.benchmarks.measuring import launch, records  # noqa: E402
from integration_tests.benchmarks.memory import memory  # noqa: E402
from integration_tests.benchmarks.restore import restore_budget  # noqa: E402

F32 = 4
PUBLISHED = {2: 23, 4: 34, 8: 38}  # per cent less than without reuse, MPMoE Fig. 11, parameters and gradients included
SHAPES = {"GPT-S": 192, "BERT-L": 256, "GPT-XL": 512}  # M of MPipeMoE's Table III over 4; H = 4 M
PAPER_POLICIES = ("S1", "S2", "S3", "S4")
WITHOUT_COPIES = ("S4", "k/rec", "red/k")
LEAST_SHARE, LEAST_SAVING, MOST_TIME = 0.99, 0.60, 1.05


def delta(rows: int, M: int, H: int, n: int) -> float:
    """MPipeMoE eq. 5, second line, in bytes."""
    return F32 * rows * (2 * M * (n - 2) / n + H * (n - 1) / n)


def without_reuse(rows: int, M: int, H: int) -> float:
    """The paper's pipeline without reuse, in bytes: activations and their gradients, without the host's tokens."""
    return F32 * rows * 2 * (2.0 * M + H)


def footprint(rows: int, M: int, H: int) -> dict[str, float]:
    """Eq. 2 and 3 in bytes: activations and temporaries without a pipeline."""
    return {"eq2_activations": F32 * (4.0 * rows * M + rows * H), "eq3_temporaries": F32 * (rows * M + rows * H)}


def offloaded(line: dict, rows: int, M: int, H: int) -> int:
    """Bytes that lie in the host pool."""
    return F32 * rows * (M * (line["policy"] in ("S1", "S3")) + H * (line["policy"] in ("S1", "S2")))


def held(line: dict, rows: int, M: int, H: int) -> int:
    """Bytes on the device at once, in forward or in backward, as the allocator counted them."""
    slots = max(line["forward_slot_bytes"], line["slot_bytes"])
    return line["saved_bytes"] - offloaded(line, rows, M, H) + slots


def share_of_bound(line: dict, rows: int, M: int, H: int) -> float | None:
    if line["chunks"] == 1 or line["policy"] not in PAPER_POLICIES:
        return None  # eq. 5 speaks of chunks that share
    saved = without_reuse(rows, M, H) - held(line, rows, M, H)
    return saved / (2 * delta(rows, M, H, line["chunks"]))


def show_stock(line: dict) -> str:
    peak = line.get("peak_bytes")
    size = "not measured" if peak is None else f"{peak / (1 << 20):8.1f} MiB"
    return f"{line['policy']:<42}{size:>22}{1000 * line['median_s']:26.1f} ms"


def step_ratio(line: dict, none: dict) -> float:
    """Its step over that of `none` of the same n: of pairs run directly beside each other, else of the same rounds."""
    pairs = line.get("pair_ratios") or [a / b for a, b in zip(line["wall_s"], none["wall_s"], strict=True)]
    return statistics.median(pairs)


def quickest_none(lines: list[dict]) -> dict:
    """No reuse at the n at which it is fastest."""
    return min((line for line in lines if line["policy"] == "none"), key=lambda line: statistics.median(line["wall_s"]))


def verdicts(lines: list[dict]) -> tuple[list[str], bool]:
    """What the run shows of what it must, in words; whether all of it holds."""
    shares = [line["of_bound"] for line in lines if line["of_bound"] is not None and line["chunks"] in PUBLISHED]
    good_share = bool(shares) and min(shares) >= LEAST_SHARE
    text = [f"of the bound, S1 to S4 at n = 2, 4, 8: at least {100 * min(shares, default=0):.1f} % (wanted: 99 %)"]
    base = {line["chunks"]: line for line in lines if line["policy"] == "none"}
    best: tuple[float, str] | None = None
    for line in lines:
        if line["policy"] not in WITHOUT_COPIES or line["chunks"] == 1:
            continue
        none = base[line["chunks"]]
        ratio = step_ratio(line, none)
        saving = 1 - line["peak_bytes"] / none["peak_bytes"]
        if ratio <= MOST_TIME and (best is None or saving > best[0]):
            best = (
                saving,
                f"{line['policy']} at n = {line['chunks']}: -{100 * saving:.0f} % in {ratio:.2f} of the step",
            )
    found = "none within 1.05 of the step" if best is None else best[1]
    text.append(f"most saved at the same step time, without copies: {found} (wanted: -60 %)")
    quickest = quickest_none(lines)
    for line in lines:
        if line["policy"] != "k/rec" or line["chunks"] == 1:
            continue
        fastest = statistics.median(quickest["wall_s"])
        text.append(
            f"k/rec at n = {line['chunks']}: "
            f"{step_ratio(line, base[line['chunks']]):.3f} of the step of none beside it; "
            f"against none at its fastest n = {quickest['chunks']}: "
            f"{100 * (line['peak_bytes'] / quickest['peak_bytes'] - 1):+.0f} % in "
            f"{statistics.median(line['wall_s']) / fastest:.2f} of its step"
        )
    for n, published in PUBLISHED.items():
        if n not in base:
            continue
        mine = [
            f"{line['policy']} {100 * (line['peak_bytes'] / base[n]['peak_bytes'] - 1):+.0f} %"
            for line in lines
            if line["chunks"] == n and line["policy"] in PAPER_POLICIES
        ]
        text.append(
            f"n = {n}: MPMoE published -{published} % over its own no-reuse; here, of the peak: {', '.join(mine)}"
        )
    return text, good_share and best is not None and best[0] >= LEAST_SAVING


def show(line: dict, none: dict) -> str:
    mib = 1 << 20
    share = "       -" if line["of_bound"] is None else f"{100 * line['of_bound']:6.1f} %"
    smaller = 100 * (line["peak_bytes"] / none["peak_bytes"] - 1)
    return (
        f"{line['policy']:<5} {line['chunks']:>3}  {line['saved_bytes'] / mib:9.1f}"
        f"  {line['forward_slot_bytes'] / mib:7.1f} "
        f"{line['slot_bytes'] / mib:7.1f}  {line['peak_bytes'] / mib:8.1f} ({smaller:+5.0f} %)  {share}"
        f"  {1000 * line['median_s']:8.1f} ms ({line['median_s'] / none['median_s']:.2f}x)"
    )


def paper(rows: int, M: int, H: int, E: int, n: int) -> dict[str, float]:
    """Eq. 1 to 6 as printed (elements), by the library: `states`, `saved_share` (eq. 6) and the rest."""
    library = load()
    out = library.ffi.new("sluice_paper_footprint_t *")
    library.lib.sluice_paper_footprint(rows, M, H, E, n, out)
    return {name: getattr(out, name) for name in ("states", "activations", "temporaries", "saving", "saved_share")}


def beside_eq6(lines: list[dict], rows: int, M: int, H: int, E: int) -> list[str]:
    """Eq. 6 at each n; the true peak relative to `none` of that n, with eq. 1's states on both sides and without."""
    text = []
    base = {line["chunks"]: line for line in lines if line["policy"] == "none"}
    for n, none in base.items():
        if n == 1:
            continue
        eq = paper(rows, M, H, E, n)
        states = F32 * eq["states"]
        found = [
            f"{line['policy']} {100 * ((line['peak_bytes'] + states) / (none['peak_bytes'] + states) - 1):+.0f} "
            f"({100 * (line['peak_bytes'] / none['peak_bytes'] - 1):+.0f}) %"
            for line in lines
            if line["chunks"] == n and line["policy"] in PAPER_POLICIES
        ]
        text.append(
            f"n = {n}: eq. 6 says {-100 * eq['saved_share']:+.0f} % of everything; the true peak with eq. 1's states "
            f"(without): {', '.join(found)}"
        )
    return text


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for name, value in {"T": 2048, "M": 512, "H": 2048, "E": 8, "K": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument(
        "--shapes", nargs="+", choices=tuple(SHAPES), help="the papers' shapes, scaled, in place of M, H"
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--pairs", type=int, default=8, help="of each policy without copies beside none")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--link", default="0.1gbit")
    parser.add_argument("--gemm", default="auto")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hot", help='only this: one expert with so many times the rows of each other, or "all" rows')
    parser.add_argument(
        "--budget", type=bytes_of, help="of the four layers, or of --hot; default: half of T_DI and T_M"
    )
    parser.add_argument("--records", type=Path)
    parser.add_argument("--check", action="store_true", help="fail if what must be shown is not")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, seconds, no records: does everything run?")
    return parser


def bytes_of(text: str) -> int:
    """As "memory_budget" in a config."""
    try:
        return config.parse({"memory_budget": int(text) if text.isdigit() else text})[1].memory_budget or 0
    except config.ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def budget_plan(options: argparse.Namespace, layers: int, hot: str | None) -> dict:
    """For restore_budget_rank.py."""
    shape = {name: getattr(options, name) for name in "TMHEK"}
    budget = options.budget or restore_budget.default_budget(options.T * options.K, options.M, options.H, layers)
    rest = {"gemm": options.gemm, "seed": options.seed, "rounds": options.rounds, "n": 0}
    return {**shape, **rest, "layers": layers, "hot": hot, "budget": budget}


def run_budget(options: argparse.Namespace, layers: int, hot: str | None, progress: launch.Progress) -> dict:
    """A run under a budget, said aloud."""
    plan = budget_plan(options, layers, hot)
    found, link = restore_budget.ask(plan, ranks=options.ranks, link=options.link, progress=progress)
    print(restore_budget.show(found))
    return {"plan": plan, "link": link, **found}


def run_shape(options: argparse.Namespace, name: str, progress: launch.Progress) -> bool:
    """The table of one shape and the model of four layers; whether all holds that must."""
    plan = {
        name: getattr(options, name) for name in ("T", "M", "H", "E", "K", "chunks", "rounds", "pairs", "gemm", "seed")
    }
    with tempfile.TemporaryDirectory() as folder:
        preload, note = memory.build_watch(Path(folder))
        if note:
            progress.line(note)
        lines, link = launch.ask(
            HERE / "restore_rank.py",
            plan,
            world_size=options.ranks,
            rate=options.link,
            deadline_s=1800,
            progress=progress,
            preload=preload,
        )
    rows = options.T * options.K
    sizes = footprint(rows, options.M, options.H)
    mib = 1 << 20
    shape = " ".join(f"{name} {getattr(options, name)}" for name in "TMHEK")
    print(f"\n{shape} W {options.ranks}, link {options.link}, f32{f' ({name})' if name else ''}")
    eq2, eq3 = (sizes[name] / mib for name in ("eq2_activations", "eq3_temporaries"))
    print(f"eq. 2 activations {eq2:.1f} MiB, eq. 3 temporaries {eq3:.1f} MiB")
    print("policy  n   saved MiB  slots f/b MiB        peak MiB         of bound      step")
    stock = [line for line in lines if line["policy"].startswith("stock")]
    lines = [line for line in lines if line not in stock]
    base = {line["chunks"]: line for line in lines if line["policy"] == "none"}
    for line in lines:
        none = base[line["chunks"]]
        line["of_bound"] = share_of_bound(line, rows, options.M, options.H)
        print(show(line, none))
    for line in stock:
        print(show_stock(line))
    text, good = verdicts(lines)
    text += beside_eq6(lines, rows, options.M, options.H, options.E)
    print("\n".join(["", *text]))
    model = run_budget(options, restore_budget.LAYERS, None, progress)
    if options.records:
        papers = {n: paper(rows, options.M, options.H, options.E, n) for n in base}
        fields = {"plan": plan, "link": link, "paper": papers, "lines": [*lines, *stock], "model": model}
        records.write(options.records / f"restore{f'-{name.lower()}' if name else ''}.json", fields)
    return good and restore_budget.holds(model)


def main() -> int:
    parser = arguments()
    options = parser.parse_args()
    if options.smoke:
        options.T, options.M, options.H, options.chunks = 256, 32, 64, [1, 2, 4]
        options.rounds, options.pairs, options.link, options.records = 1, 1, "none", None
    if options.hot not in (None, "all") and not (options.hot or "").isdigit():
        parser.error(f'--hot is {options.hot!r}; it must be a whole number or "all"')
    if (options.T * options.K) % (options.E * max(options.chunks)) != 0:
        parser.error("T * K must be a multiple of E times the largest n: routing is balanced to the row")
    progress = launch.Progress()
    if options.hot:
        found = run_budget(options, 1, options.hot, progress)
        if options.records:
            records.write(options.records / f"restore-hot-{options.hot}.json", found)
        return 1 if options.check and not restore_budget.holds(found) else 0
    good = True
    for name in options.shapes or [""]:
        if name:
            options.M, options.H = SHAPES[name], 4 * SHAPES[name]
        good = run_shape(options, name, progress) and good
    if options.smoke:
        for hot in ("10", "all"):
            run_budget(options, 1, hot, progress)
    return 1 if options.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
