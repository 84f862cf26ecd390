"""transformers' experts blocks: Sluice beside grouped_mm (and eager), in turns, with the roofline of the same run.

    .venv/bin/python -m integration_tests.benchmarks.experts [--shapes mixtral qwen3 deepseek] [--tokens 256 1024]
        [--dtypes float32 bfloat16] [--threads 1 2] [--gradients fresh kept] [--rounds 5] [--eager] [--check] [--smoke]

Per cell: forward and backward seconds (medians), speedups over neighbouring pairs, peak memory of a backward over what
is resident, saved bytes, and calls without gradients (experts_decode.py). The roofline is the larger of two times
measured between the rounds: plain dense GEMMs of the same flops; and bytes (weights read twice, gradients, rows)
over the copy bandwidth of the same threads. Every cell runs with gradients

- fresh in each step, as with zero_grad(set_to_none=True): written once, and a second roofline charges their bytes at
  the measured rate of fresh pages;
- kept from step to step and added to, as in the micro-steps of an accumulation: read and written, no fresh pages.

--check: the marks of experts_marks.py; exit code 1 where one is missed.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import itertools
import sys
from pathlib import Path
from typing import Any

import sluice
import torch

from integration_tests.benchmarks.experts import experts_marks
from integration_tests.benchmarks.experts.experts_block import SHAPES, Rows, Shape, make_module, make_rows, seconds
from integration_tests.benchmarks.experts.experts_decode import decode
from integration_tests.benchmarks.measuring import records
from integration_tests.benchmarks.measuring.stats import pair_ratios, quartiles


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
    """Six dense GEMMs with the flops of the block: as fast as GEMMs get here."""

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
    """Bytes read plus bytes written per second, of a large copy by the threads of this run."""
    source, target = (torch.ones(megabytes << 18) for _ in range(2))
    target.copy_(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source))[0] for _ in range(3))


def fresh_page_rate(megabytes: int = 256) -> float:
    """Bytes per second of writing memory that has just come from the system."""
    return (megabytes << 20) / min(seconds(lambda: torch.ones(megabytes << 18))[0] for _ in range(3))


def traffic(shape: Shape, tokens: int, module: Any, rows: Rows) -> dict[str, int]:
    """Bytes that no implementation can avoid: only experts with rows are read, and of kept gradients only theirs."""
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
    """The highest resident size of a backward over that before it, in units of all parameter gradients; saved bytes.

    keep_grads: those that are there stay.
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
    ctypes.CDLL(None).malloc_trim(0)  # what is kept of freed memory would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    out.backward(rows.grad)
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    return {"peak_over_gradients": (_status("VmHWM") - before) / gradients, "saved_mib": sum(saved.values()) / 2**20}


# ---- one cell ----


def run_cell(
    name: str, shape: Shape, tokens: int, dtype: torch.dtype, gradients: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Everything about one shape, number of tokens, dtype, fresh or kept gradients; threads are set already."""
    keeps = gradients == "kept"
    module, rows, dense = make_module(shape, dtype), make_rows(shape, tokens, dtype), Dense(shape, tokens, dtype)
    names = ["sluice", "grouped_mm", *(["eager"] if options.eager else [])]
    times: dict[str, dict[str, list[float]]] = {
        side: {"forward": [], "backward": []} for side in (*names, "dense", "roofline_bytes")
    }
    pages, in_place = [], 0
    for number in range(options.rounds + 1):
        bandwidth, page_rate = copy_bandwidth(options.copy_mb), fresh_page_rate(options.copy_mb)
        # What a step frees the next one finds warm, and a system may take pages back that lie free for a while: so each
        # side follows a step of its own kind, and the order turns.
        sides = {}
        for side in names if number % 2 else reversed(names):
            step(module, side, rows, keeps)
            sides[side] = step(module, side, rows, keeps)
        sides["dense"] = (seconds(dense.forward)[0], seconds(dense.backward)[0])
        moved = traffic(shape, tokens, module, rows)
        sides["roofline_bytes"] = (
            moved["forward"] / bandwidth,
            (moved["backward"] + moved[gradients]) / bandwidth,
        )
        if number == 0:  # warm-up: pages, plans, choices of GEMMs
            in_place = sluice.stats(module)["passes_in_place"]
            continue
        pages.append(0.0 if keeps else max(0.0, moved["fresh"] / page_rate - moved["fresh"] / bandwidth))
        for side, (forward, backward) in sides.items():
            times[side]["forward"].append(forward)
            times[side]["backward"].append(backward)
    total = {side: [a + b for a, b in zip(t["forward"], t["backward"])] for side, t in times.items()}
    roofline = [max(a, b) for a, b in zip(total["dense"], total["roofline_bytes"])]
    fresh = [a + b for a, b in zip(roofline, pages)]
    in_place = sluice.stats(module)["passes_in_place"] - in_place
    record: dict[str, Any] = {
        "shape": name,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "gradients": gradients,
        "seconds": {side: {half: quartiles(values) for half, values in t.items()} for side, t in times.items()},
        "roofline_s": quartiles(roofline),
        "of_roofline": {side: pair_ratios(roofline, total[side]) for side in names},
        "speedup_over": {side: pair_ratios(total[side], total["sluice"]) for side in names[1:]},
        "memory": {side: backward_peak(module, side, rows, keeps) for side in names},
    }
    if not keeps:
        record["roofline_with_fresh_pages_s"] = quartiles(fresh)
        record["of_roofline_with_fresh_pages"] = {side: pair_ratios(fresh, total[side]) for side in names}
    record["sluice_stats"] = {
        key: value for key, value in sluice.stats(module).items() if isinstance(value, (int, str))
    }
    record["sluice_stats"]["passes_in_place"] = in_place  # of the measured rounds, two steps each
    return record


def show(record: dict[str, Any]) -> None:
    """One line per cell."""
    ours, memory, fresh = record["of_roofline"]["sluice"]["median"], record["memory"], ""
    if record["gradients"] == "fresh":
        fresh = f" ({record['of_roofline_with_fresh_pages']['sluice']['median']:.2f} with fresh pages)"
    print(
        f"{record['shape']:>9} T {record['tokens']:<5} {record['dtype']:<9} {record['threads']} threads, "
        f"gradients {record['gradients']:<5}: {ours:.2f} of the roofline{fresh}, "
        f"grouped_mm {record['of_roofline']['grouped_mm']['median']:.2f}; "
        f"{record['speedup_over']['grouped_mm']['median']:.2f} x grouped_mm; backward peak / gradients "
        f"{memory['sluice']['peak_over_gradients']:.2f}, grouped_mm {memory['grouped_mm']['peak_over_gradients']:.2f}; "
        f"saved {memory['sluice']['saved_mib']:.0f} of {memory['grouped_mm']['saved_mib']:.0f} MiB",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["mixtral", "qwen3", "deepseek"], choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 1024])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--gradients", nargs="+", default=["fresh", "kept"], choices=["fresh", "kept"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copy-mb", type=int, default=256)
    parser.add_argument("--eager", action="store_true", help="also transformers' eager loop: slow")
    parser.add_argument("--no-decode", action="store_true")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a mark is missed")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, to see that everything runs")
    parser.add_argument("--record", type=Path, default=records.FOLDER / "experts.json")
    options = parser.parse_args()
    if options.smoke:
        options.shapes, options.tokens, options.rounds, options.copy_mb = ["smoke"], [64], 2, 8
    found: dict[str, Any] = {"seed": 1, "cells": [], "decode": {}}
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name in options.shapes:
            for dtype in (getattr(torch, word) for word in options.dtypes):
                for tokens, gradients in itertools.product(options.tokens, options.gradients):
                    record = run_cell(name, copy.copy(SHAPES[name]), tokens, dtype, gradients, options)
                    show(record)
                    found["cells"].append(record)
                if not options.no_decode:
                    key = f"{name} {str(dtype).removeprefix('torch.')} {threads} threads"
                    found["decode"][key] = decode(SHAPES[name], dtype, ["sluice", "grouped_mm"], 3 * options.rounds)
                    for count, cell in found["decode"][key].items():
                        print(
                            f"{key}, decode T {count}: {cell['sluice']['call_us']:.0f} us, GEMMs "
                            f"{cell['gemms_us']:.0f}; at width 16 {cell['sluice']['narrow_us']:.0f}, "
                            f"{cell['sluice']['overhead_us']:.0f} of them over its GEMMs "
                            f"(grouped_mm {cell['grouped_mm']['narrow_us']:.0f})",
                            flush=True,
                        )
                records.write(options.record, found)  # what is done is kept
    print(f"wrote {options.record.name}")
    if not options.check:
        return 0
    lines, good = experts_marks.verdicts(found["cells"], {} if options.smoke else found["decode"])
    print("\n".join(lines))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
