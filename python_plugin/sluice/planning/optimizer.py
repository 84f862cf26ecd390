# SPDX-License-Identifier: Apache-2.0
"""Predicts bytes and seconds of an optimizer step, by tier and by k, by `sluice_optimizer_predict`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .._library import load
from .planner import DTYPES

NEAR, FAR, FILE = "near", "far", "file"
TIERS = (NEAR, FAR, FILE)  # where masters and moments are stored
ALL_BUCKETS = (1 << 63) - 1
BY_K = ("1", "2", "4", "inf")


@dataclass(frozen=True)
class Workload:
    """Describes a step of one rank. Rates are in bytes per second; 0: takes no time."""

    count: int
    tier: str = FAR
    dtype: str = "bf16"
    grad_dtype: str | None = None  # None: dtype
    bucket: int = 1 << 22
    slots: int = 2
    sum_buckets: int = 0  # 0: the best
    world_size: int = 1
    decides: bool = False
    update_rate: float = 0.0
    copy_in_rate: float = 0.0
    copy_out_rate: float = 0.0
    sum_rate: float = 0.0
    sum_seconds: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """bytes: of parts and tiers; seconds_by_k: of a step; parts: seconds of each part by itself."""

    bytes: dict[str, int]
    sum_buckets: int
    seconds: float
    seconds_by_k: dict[str, float]
    parts: dict[str, float]


_BYTES = ("param", "grad", "slot", "staging", "near", "state", "file", "whole")
_PARTS = ("update", "copy_in", "copy_out", "sum")


def predict(work: Workload) -> Prediction:
    """Predicts a step. Raises InvalidArgument that names the field."""
    library = load()
    asked, found = library.new("optimizer_workload"), library.new("optimizer_prediction")
    asked.num_slots = 0 if work.tier == NEAR else work.slots
    asked.param_dtype, asked.grad_dtype = DTYPES[work.dtype], DTYPES[work.grad_dtype or work.dtype]
    same: tuple[str, ...] = ("count", "bucket", "sum_buckets", "world_size", "decides", "sum_seconds")
    same += ("update_rate", "copy_in_rate", "copy_out_rate", "sum_rate")
    for name in same:
        setattr(asked, name, getattr(work, name))
    library.check(library.lib.sluice_optimizer_predict(asked, found))
    return Prediction(
        bytes={name: getattr(found, f"{name}_bytes") for name in _BYTES},
        sum_buckets=found.sum_buckets,
        seconds=found.seconds,
        seconds_by_k=dict(zip(BY_K, found.seconds_by_k)),
        parts={name: getattr(found, f"{name}_seconds") for name in _PARTS},
    )


def by_tier(work: Workload, prediction: Prediction) -> dict[str, int]:
    """Returns the bytes by tier: near; far, if the states are stored there; in the file, if there is one."""
    found: dict[str, Any] = {NEAR: prediction.bytes["near"], FAR: 0, FILE: 0}
    if work.tier == FAR:
        found[FAR] = prediction.bytes["state"]
    if work.tier == FILE:
        found[FILE] = prediction.bytes["file"]
    return found
