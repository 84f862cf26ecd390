"""What an experts block promises (issue 6), asked of the cells of experts.py."""

from __future__ import annotations

from typing import Any

LEAST_OF_ROOFLINE = 0.75
MOST_PEAK = {"fresh": 1.25, "kept": 2.25}  # of a backward over what is resident, in units of all gradients
MOST_SAVED = 0.5  # of grouped_mm's
MOST_OVERHEAD_US = 30  # of a call without gradients, over its GEMMs
_FINE_GRAINED = {"float32": 1.5, "bfloat16": 2.5}
LEAST_SPEEDUP = {  # over grouped_mm
    "mixtral": {"float32": 1.2, "bfloat16": 1.5},
    "qwen3": _FINE_GRAINED,
    "deepseek": _FINE_GRAINED,
}


def missed(cell: dict[str, Any]) -> list[str]:
    """The promises that a cell does not keep, in words. A shape without marks for its time keeps those.

    Fresh gradients: their bytes are charged at the rate of fresh pages, which every implementation pays.
    """
    said = []
    kind, memory = cell["gradients"], cell["memory"]
    if cell["shape"] in LEAST_SPEEDUP:
        roofline = "of_roofline" if kind == "kept" else "of_roofline_with_fresh_pages"
        reached = cell[roofline]["sluice"]["median"]
        if reached < LEAST_OF_ROOFLINE:
            said.append(f"{reached:.2f} of the roofline, wanted {LEAST_OF_ROOFLINE}")
        wanted = LEAST_SPEEDUP[cell["shape"]].get(cell["dtype"])
        speedup = cell["speedup_over"]["grouped_mm"]["median"]
        if wanted is not None and speedup < wanted:
            said.append(f"{speedup:.2f} x grouped_mm, wanted {wanted}")
        peak = memory["sluice"]["peak_over_gradients"]
        if peak > MOST_PEAK[kind]:
            said.append(f"backward's peak {peak:.2f} of the gradients, at most {MOST_PEAK[kind]}")
    saved = memory["sluice"]["saved_mib"] / memory["grouped_mm"]["saved_mib"]
    if saved > MOST_SAVED:
        said.append(f"saved bytes {saved:.2f} of grouped_mm's, at most {MOST_SAVED}")
    return said


def missed_by_decode(key: str, cells: dict[str, Any]) -> list[str]:
    """The same of the calls without gradients of a shape: what they take at widths of 16 over their own GEMMs,
    transformers' part of the call counted, and the whole call beside a loop of GEMMs at the shape's widths."""
    said = []
    for tokens, cell in cells.items():
        took = cell["sluice"]["overhead_us"]
        if took > MOST_OVERHEAD_US:
            said.append(f"missed: {key}, decode T {tokens}: {took:.0f} us over GEMMs, at most {MOST_OVERHEAD_US}")
        over = cell["sluice"]["call_us"] - cell["gemms_us"]
        if over > MOST_OVERHEAD_US:
            said.append(f"missed: {key}, decode T {tokens}: {over:.0f} us over a loop of torch.mm")
    return said


def verdicts(cells: list[dict[str, Any]], decode: dict[str, Any] | None = None) -> tuple[list[str], bool]:
    """A line for each cell that misses something, and whether none does."""
    lines = []
    for cell in cells:
        name = f"{cell['shape']} T {cell['tokens']} {cell['dtype']} {cell['threads']} threads"
        name += f", gradients {cell['gradients']}"
        lines += [f"missed: {name}: {text}" for text in missed(cell)]
    for key, calls in (decode or {}).items():
        lines += missed_by_decode(key, calls)
    return lines or [f"all {len(cells)} cells keep the marks"], bool(cells) and not lines
