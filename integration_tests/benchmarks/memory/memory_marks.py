"""What a layer's memory may be: promised multiples of its parts, and of what stock takes for the same rows."""

from __future__ import annotations

from typing import Any

MOST_OVER_PARTS = 1.1


def memory_over_parts(sluice_stats: list[dict[str, Any]]) -> float:
    """Peak of a settled layer over slots + saved tensors; of the rank where that is most."""
    return max(s["peak_bytes"] / (s["slot_bytes"] + s["saved_bytes"]) for s in sluice_stats)


def memory_bound(record: dict[str, Any]) -> dict[str, Any]:
    """All that Sluice had allocated over stock's peak x real rows / padded rows, on the rank with the most rows.

    `of_ranks` has every rank by the rows that it receives. One that receives few still holds the rows of all its own
    tokens, on their way out and as they return, which are as many as on any rank. `of_ranks_by_tensor` counts each kind
    of stock's padded rows by its own real rows.
    """
    received, padded = record["parts"]["rows_received"], record["parts"]["rows_padded"]
    peaks = [found["peak_bytes"] for found in record["sluice_stats"]]
    allowed = [m["stock"]["peak_bytes"] * rows / padded for m, rows in zip(record["memory"], received, strict=True)]
    of_ranks = [peak / most if most else None for peak, most in zip(peaks, allowed, strict=True)]
    fullest = max(range(len(received)), key=received.__getitem__)
    bound = {"of_bound": of_ranks[fullest], "rank": fullest, "bound_bytes": int(allowed[fullest]), "of_ranks": of_ranks}
    if "M" in record["cell"]:
        shares = real_shares(record)
        both = zip(peaks, record["memory"], shares, strict=True)
        bound["of_ranks_by_tensor"] = [peak / (m["stock"]["peak_bytes"] * share) for peak, m, share in both]
    return bound


def real_shares(record: dict[str, Any]) -> list[float]:
    """By rank the part of stock's padded rows that are real, each row by its width. Stock pads alike what a rank sends
    (rows out and returned, M each) and what it receives (rows in, before and behind the activation, out: 2 M + 2 H)."""
    parts, cell = record["parts"], record["cell"]
    received, padded = parts["rows_received"], parts["rows_padded"]
    # Older records have no rows_sent: all routes, less those that were dropped.
    sent = parts.get("rows_sent", [sum(received) / len(received)] * len(received))
    out, there = 2 * cell["M"], 2 * cell["M"] + 2 * cell["H"]
    return [(r * there + s * out) / (padded * (there + out)) for r, s in zip(received, sent, strict=True)]


def kept(record: dict[str, Any]) -> bool:
    """Whether a record holds both promises, as far as it has them: without the allocation watch stock's is unknown."""
    over, bound = record.get("memory_over_parts"), record.get("memory_bound")
    return (over is None or over <= MOST_OVER_PARTS) and (bound is None or bound["of_bound"] <= 1.0)
