"""What a layer's memory may be: promised multiples of its parts, and of what stock takes for the same rows."""

from __future__ import annotations

from typing import Any

MOST_OVER_PARTS = 1.1


def memory_over_parts(sluice_stats: list[dict[str, Any]]) -> float:
    """Peak of a settled layer over slots + saved tensors; of the rank where that is most."""
    return max(s["peak_bytes"] / (s["slot_bytes"] + s["saved_bytes"]) for s in sluice_stats)


def memory_bound(record: dict[str, Any]) -> dict[str, Any]:
    """All that Sluice had allocated over stock's peak x real rows / padded rows, on the rank with the most rows.

    `of_ranks` has every rank: one that receives few rows still has the returned rows of all its own tokens, which
    stock's padded rows have nothing to do with.
    """
    received, padded = record["parts"]["rows_received"], record["parts"]["rows_padded"]
    peaks = [found["peak_bytes"] for found in record["sluice_stats"]]
    allowed = [m["stock"]["peak_bytes"] * rows / padded for m, rows in zip(record["memory"], received, strict=True)]
    of_ranks = [peak / most if most else None for peak, most in zip(peaks, allowed, strict=True)]
    fullest = max(range(len(received)), key=received.__getitem__)
    return {"of_bound": of_ranks[fullest], "rank": fullest, "bound_bytes": int(allowed[fullest]), "of_ranks": of_ranks}


def kept(record: dict[str, Any]) -> bool:
    """Whether a record holds both promises, as far as it has them: without the allocation watch stock's is unknown."""
    over, bound = record.get("memory_over_parts"), record.get("memory_bound")
    return (over is None or over <= MOST_OVER_PARTS) and (bound is None or bound["of_bound"] <= 1.0)
