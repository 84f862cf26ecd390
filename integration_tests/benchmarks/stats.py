"""The few statistics that records carry."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return {"q1": values[0], "median": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"q1": q1, "median": median, "q3": q3}


def pair_ratios(top: Sequence[float], bottom: Sequence[float]) -> dict[str, float]:
    """Quartiles of top / bottom over neighbouring pairs: what drifts slowly cancels."""
    return quartiles([a / b for a, b in zip(top, bottom, strict=True)])
