# SPDX-License-Identifier: Apache-2.0
"""Cells of the layer benchmarks. A cell is one shape, routing, dtype, number of ranks and link."""

from __future__ import annotations

from dataclasses import asdict, dataclass

CAPACITY_FACTOR = 1.25


@dataclass(frozen=True)
class Cell:
    """T tokens per rank, M model width, H hidden width, E experts, K routes per token, W ranks."""

    name: str
    link: str = "1gbit"
    W: int = 2
    T: int = 2048
    M: int = 1024
    H: int = 4096
    E: int = 8
    K: int = 1
    skew: float = 1.0  # the first expert gets this many times the mean load; 1 is balanced
    drop: bool = False
    dtype: str = "float32"
    must_reach: float | None = None  # speed-up over stock
    must_pipeline: float | None = None  # time with one chunk over time with the chosen n

    def as_dict(self) -> dict[str, object]:
        """Return the fields as plain data."""
        return asdict(self)


NAMED = [
    Cell("drop-4g", "4gbit", drop=True, must_reach=1.25),
    Cell("nodrop-1g", "1gbit", must_reach=1.22),
    Cell("nodrop-400m", "0.4gbit", must_reach=1.6, must_pipeline=1.15),
    Cell("nodrop-200m", "0.2gbit", must_reach=2.0, must_pipeline=1.3),
    Cell("drop-200m", "0.2gbit", drop=True, must_reach=2.4, must_pipeline=1.3),
    Cell("drop-skew5-1g", "1gbit", drop=True, skew=5, must_reach=2.2),
    Cell("nodrop-skew5-1g", "1gbit", skew=5, must_reach=3.8),
    Cell("nodrop-skew5-200m", "0.2gbit", skew=5, must_reach=6.5),
]
