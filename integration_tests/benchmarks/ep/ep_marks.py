"""What expert parallelism promises beside stock `all_to_all` (issue 6), asked of the lines of ep.py."""

from __future__ import annotations

from typing import Any

LEAST_SPEEDUP = 1.5
MOST_SLOWER = 1.03
BALANCED = (0.5, 2.0)  # stock's communication over its computation, where the gain can be largest


def is_balanced(line: dict[str, Any]) -> bool:
    """Whether communication takes about as long as computation."""
    return BALANCED[0] <= line["comm_s"] / line["compute_s"] <= BALANCED[1]


def missed(line: dict[str, Any]) -> list[str]:
    """The promises that a line does not keep, in words. Slower: by more than 3 % in three of four pairs (grid.py)."""
    said = []
    gain = line["speedup"]
    if is_balanced(line) and gain["median"] < LEAST_SPEEDUP:
        said.append(f"{gain['median']:.2f} x stock where communication is about computation, wanted {LEAST_SPEEDUP}")
    if 1 / gain["q3"] > MOST_SLOWER:
        said.append(f"slower than stock: {1 / gain['q3']:.2f} of its time in the best quarter of pairs")
    return said


def verdicts(lines: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """A line for each promise that is missed or that nothing shows, and whether there is none."""
    said = [f"missed: {x['name']} {x['dtype']} {x['link']}: {text}" for x in lines for text in missed(x)]
    balanced = sum(is_balanced(line) for line in lines)
    if balanced == 0:
        said.append("not shown: in no cell does communication take about as long as computation")
    return said or [f"all {len(lines)} cells keep the marks, {balanced} of them balanced"], not said
