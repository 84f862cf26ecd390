# SPDX-License-Identifier: Apache-2.0
"""transformers' experts blocks: Sluice and grouped_mm in turns, with the roofline of the same run.

Each cell reports forward and backward seconds, speed-ups over neighbouring pairs, the peak memory of a backward above
the resident size before it, and saved bytes. The roofline is the larger of two times measured between the rounds: plain
dense GEMMs with the same flops, and the bytes (weights read twice, gradients, rows) over the copy bandwidth of the same
threads. Gradients are

- fresh in each step, as after zero_grad(set_to_none=True): they are written once, and the roofline charges their bytes
  at the measured rate of fresh pages;
- kept and accumulated, as in the micro-steps of an accumulation: they are read and written, without fresh pages.

--decode measures calls without gradients instead (experts_decode.py).
"""

import argparse
import ctypes
import itertools
from pathlib import Path
from typing import Any

import sluice
import torch

from integration_tests.benchmarks.experts import experts_decode
from integration_tests.benchmarks.experts.experts_block import SHAPES, Rows, Shape, make_module, make_rows, seconds
from integration_tests.benchmarks.measuring import pages, records
from integration_tests.benchmarks.measuring.bench import Bench, Option
from integration_tests.benchmarks.measuring.stats import misses, pair_ratios, quartiles

PAGE = "benchmarks/experts.md"
OPTIONS = {
    "shapes": Option(["deepseek", "qwen3", "mixtral"], choices=list(SHAPES)),
    "tokens": Option([256, 1024]),
    "dtypes": Option(["float32", "bfloat16"]),
    "threads": Option([1, 2]),
    "gradients": Option(["fresh", "kept"], choices=("fresh", "kept")),
    "rounds": Option(5),
    "copy_mb": Option(256, "of the copy that measures the bandwidth"),
    "decode": Option(False, "calls without gradients, for a few tokens, instead"),
}
SMOKE = {"shapes": ["smoke"], "tokens": [64], "rounds": 2, "copy_mb": 8}
SIDES = ("sluice", "grouped_mm")
LEAST_OF_ROOFLINE = 0.75
MOST_PEAK = {"fresh": 1.25, "kept": 2.25}  # growth of resident memory in a backward, in units of all gradients
MOST_SAVED = 0.5  # saved bytes over those of grouped_mm
_FINE_GRAINED = {"float32": 1.5, "bfloat16": 2.5}
LEAST_SPEEDUP = {  # over grouped_mm
    "mixtral": {"float32": 1.2, "bfloat16": 1.5},
    "qwen3": _FINE_GRAINED,
    "deepseek": _FINE_GRAINED,
}


def step(module: Any, name: str, rows: Rows, keep_grads: bool) -> tuple[float, float]:
    """(forward, backward) seconds of one step."""
    module.config._experts_implementation = name
    if not keep_grads:
        module.zero_grad(set_to_none=True)
    tokens, weights = rows.tokens.detach().requires_grad_(), rows.weights.detach().requires_grad_()
    forward, out = seconds(lambda: module(tokens, rows.ids, weights))
    backward, _ = seconds(lambda: out.backward(rows.grad))
    return forward, backward


# ---- the roofline ----


class Dense:
    """Six dense GEMMs with the flops of the block, as a bound for the speed of its GEMMs."""

    def __init__(self, shape: Shape, tokens: int, dtype: torch.dtype, gated: bool = True) -> None:
        rows, wide = tokens * shape.top_k, (1 + gated) * shape.hidden
        self.x, self.dy = (torch.randn(rows, shape.model).to(dtype) for _ in range(2))
        self.act, self.dpre = torch.randn(rows, shape.hidden).to(dtype), torch.randn(rows, wide).to(dtype)
        self.up = torch.randn(wide, shape.model).to(dtype)
        self.down = torch.randn(shape.model, shape.hidden).to(dtype)

    def forward(self) -> None:
        """Two GEMMs."""
        torch.mm(self.x, self.up.t())
        torch.mm(self.act, self.down.t())

    def backward(self) -> None:
        """Four GEMMs."""
        torch.mm(self.dy, self.down)
        torch.mm(self.dpre, self.up)
        torch.mm(self.dy.t(), self.act)
        torch.mm(self.dpre.t(), self.x)


def copy_bandwidth(megabytes: int = 256) -> float:
    """Bytes read plus bytes written per second in a large copy by the threads of this run."""
    source, target = (torch.ones(megabytes << 18) for _ in range(2))
    target.copy_(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source))[0] for _ in range(3))


def fresh_page_rate(megabytes: int = 256) -> float:
    """Bytes per second when torch writes memory that the system has just mapped."""
    return (megabytes << 20) / min(seconds(lambda: torch.ones(megabytes << 18))[0] for _ in range(3))


def traffic(shape: Shape, tokens: int, module: Any, rows: Rows) -> dict[str, int]:
    """Bytes that no implementation can avoid. Only experts with rows are read, and only their kept gradients change."""
    element = module.down_proj.element_size()
    per_expert = 3 * shape.model * shape.hidden * element
    read = per_expert * len(rows.ids.unique())
    line = tokens * shape.top_k * element
    return {
        "forward": read + line * (2 * shape.model + 3 * shape.hidden),
        "backward": read + line * (4 * shape.model + 6 * shape.hidden),
        "fresh": per_expert * shape.experts,
        "kept": 2 * read,
    }


# ---- memory ----


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def backward_peak(module: Any, name: str, rows: Rows, keep_grads: bool) -> dict[str, float]:
    """The growth of resident memory to its peak in a backward, in units of all parameter gradients; and saved bytes.

    keep_grads: the backward accumulates into the existing gradients.
    """
    module.config._experts_implementation = name
    if not keep_grads:
        module.zero_grad(set_to_none=True)
    saved: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens, weights = rows.tokens.detach().requires_grad_(), rows.weights.detach().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(tokens, rows.ids, weights)
    sluice.give_back()
    ctypes.CDLL(None).malloc_trim(0)  # cached free memory would hide allocations
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    out.backward(rows.grad)
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    return {"peak_over_gradients": (_status("VmHWM") - before) / gradients, "saved_mib": sum(saved.values()) / 2**20}


# ---- one cell ----


def run_cell(
    name: str, shape: Shape, tokens: int, dtype: torch.dtype, gradients: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Measures one shape, number of tokens, dtype and kind of gradients. The caller has set the number of threads."""
    keeps = gradients == "kept"
    module, rows, dense = make_module(shape, dtype), make_rows(shape, tokens, dtype), Dense(shape, tokens, dtype)
    times: dict[str, dict[str, list[float]]] = {
        side: {"forward": [], "backward": []} for side in (*SIDES, "dense", "roofline_bytes")
    }
    pages = []
    for number in range(options.rounds + 1):
        bandwidth, page_rate = copy_bandwidth(options.copy_mb), fresh_page_rate(options.copy_mb)
        # A step reuses the warm memory that the previous step freed, and a system may reclaim memory that stays free.
        # So each measured step follows a step of the same side, and the order of the sides alternates.
        sides = {}
        for side in SIDES if number % 2 else reversed(SIDES):
            step(module, side, rows, keeps)
            sides[side] = step(module, side, rows, keeps)
        sides["dense"] = (seconds(dense.forward)[0], seconds(dense.backward)[0])
        moved = traffic(shape, tokens, module, rows)
        sides["roofline_bytes"] = (moved["forward"] / bandwidth, (moved["backward"] + moved[gradients]) / bandwidth)
        if number == 0:  # warm-up of pages, plans and GEMM choices
            continue
        pages.append(0.0 if keeps else max(0.0, moved["fresh"] / page_rate - moved["fresh"] / bandwidth))
        for side, (forward, backward) in sides.items():
            times[side]["forward"].append(forward)
            times[side]["backward"].append(backward)
    total = {side: [a + b for a, b in zip(t["forward"], t["backward"])] for side, t in times.items()}
    roofline = [max(a, b) + new for a, b, new in zip(total["dense"], total["roofline_bytes"], pages)]
    return {
        "shape": name,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "gradients": gradients,
        "seconds": {side: {half: quartiles(values) for half, values in t.items()} for side, t in times.items()},
        "of_roofline": pair_ratios(roofline, total["sluice"]),
        "speedup": pair_ratios(total["grouped_mm"], total["sluice"]),
        "memory": {side: backward_peak(module, side, rows, keeps) for side in SIDES},
    }


def row(cell: dict[str, Any]) -> dict[str, Any]:
    """The committed record of a cell."""
    ours, stock = (cell["memory"][side] for side in ("sluice", "grouped_mm"))
    return {
        **{name: cell[name] for name in ("shape", "tokens", "dtype", "threads", "gradients")},
        "speedup": cell["speedup"]["median"],
        "of_roofline": cell["of_roofline"]["median"],
        "peak": ours["peak_over_gradients"],
        "stock_peak": stock["peak_over_gradients"],
        "saved": ours["saved_mib"] / stock["saved_mib"],
    }


def missed(row: dict[str, Any]) -> list[str]:
    """The marks that a cell misses. A shape without LEAST_SPEEDUP has only the mark for saved bytes."""
    wanted = [("of grouped_mm's saved bytes", row["saved"], "<=", MOST_SAVED)]
    if row["shape"] in LEAST_SPEEDUP:
        least = LEAST_SPEEDUP[row["shape"]].get(row["dtype"], 0.0)
        wanted += [
            ("of the roofline", row["of_roofline"], ">=", LEAST_OF_ROOFLINE),
            ("x grouped_mm", row["speedup"], ">=", least),
            ("of the gradients is backward's peak", row["peak"], "<=", MOST_PEAK[row["gradients"]]),
        ]
    name = f"{row['shape']} T {row['tokens']} {row['dtype']} {row['threads']} threads, gradients {row['gradients']}"
    return misses(name, wanted)


def run(bench: Bench) -> list[str]:
    options = bench.options
    if options.decode:
        return experts_decode.run(bench)
    found: list[dict[str, Any]] = []
    for threads, name, dtype, tokens, gradients in itertools.product(
        options.threads, options.shapes, options.dtypes, options.tokens, options.gradients
    ):
        torch.set_num_threads(threads)
        found.append(run_cell(name, SHAPES[name], tokens, getattr(torch, dtype), gradients, options))
        bench.tell(row(found[-1]))
        bench.keep([row(cell) for cell in found], found)
    return [text for cell in found for text in missed(row(cell))]


def tables(runs: list[dict[str, Any]]) -> dict[str, str]:
    """A table for each kind of gradients: a row for each dtype, threads and tokens, and a number for each shape."""
    told: dict[str, list[str]] = {"kept": [], "fresh": [], "decode": []}
    for run in runs:
        rows = records.rows_of(run)
        if "call_us" in rows[0]:
            told["decode"].append(f"{pages.said(run)}\n\n{experts_decode.table(rows)}")
            continue
        for kind in ("kept", "fresh"):
            of_kind = [row for row in rows if row["gradients"] == kind]
            if of_kind:
                told[kind].append(f"{pages.said(run)}\n\n{_table(of_kind)}")
    return {name: "\n\n".join(each) for name, each in told.items()}


def _table(rows: list[dict[str, Any]]) -> str:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["threads"], row["tokens"]), []).append(row)
    shapes = ", ".join(dict.fromkeys(row["shape"] for row in rows))
    heads = ["dtype, threads, T", f"times as fast as `grouped_mm`: {shapes}", "share of the roofline"]
    heads += ["backward's peak ÷ gradients", "of `grouped_mm`", "saved bytes ÷ `grouped_mm`'s"]
    lines = []
    for (dtype, threads, tokens), among in groups.items():
        marks = {id(row): " ".join(missed(row)) for row in among}
        speed = ", ".join(pages.bold(f"{r['speedup']:.2f}", "x grouped_mm" in marks[id(r)]) for r in among)
        share = ", ".join(pages.bold(f"{r['of_roofline']:.2f}", "the roofline" in marks[id(r)]) for r in among)
        spans = [
            f"{min(r[n] for r in among):.2f} to {max(r[n] for r in among):.2f}" for n in ("peak", "stock_peak", "saved")
        ]
        lines.append([f"{dtype}, {threads}, {tokens}", speed, share, *spans])
    return pages.table(heads, lines)
