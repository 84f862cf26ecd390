"""The parts of restore.py under a budget: a model of four layers, and a hot expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from integration_tests.benchmarks.measuring import launch

HERE = Path(__file__).resolve().parent
LAYERS = 4
# Of the largest output: the same GEMMs, cut and added otherwise.
MOST_DIFFERENCE = 1e-4
MIB = 1 << 20
PACKING = 12 * MIB


def default_budget(rows: int, M: int, H: int, layers: int) -> int:
    """Half of what T_DI and T_M of all layers take in f32 under balanced routing: less than keeping everything needs.
    Beside that what `gemm` "auto" plans for packing, which does not grow with the rows.
    """
    return layers * rows * (M + H) * 4 // 2 + PACKING


def ask(plan: dict[str, Any], *, ranks: int, link: str, progress: launch.Progress) -> tuple[dict[str, Any], str]:
    """What restore_budget_rank.py measured, and over which link."""
    return launch.ask(
        HERE / "restore_budget_rank.py", plan, world_size=ranks, rate=link, deadline_s=900, progress=progress
    )


def show(found: dict[str, Any]) -> str:
    """One line."""
    layers = f"{found['layers']} layer{'s' * (found['layers'] > 1)}"
    hot = {None: "balanced", "all": "all rows to one expert"}.get(found["hot"], f"one expert {found['hot']} times")
    return (
        f"{layers}, {hot}: budget {found['budget_bytes'] / MIB:.1f} MiB, peak {found['peak_bytes'] / MIB:.1f} MiB "
        f"(without a budget, n = 1: {found['free_peak_bytes'] / MIB:.1f}), n = {found['chunks']}, "
        f"step {1000 * found['median_s']:.1f} ms, largest difference of the output {found['largest_difference']:.1e}"
    )


def holds(found: dict[str, Any]) -> bool:
    """Whether the peak is within the budget and the results are unchanged."""
    return found["peak_bytes"] <= found["budget_bytes"] and found["largest_difference"] <= MOST_DIFFERENCE
