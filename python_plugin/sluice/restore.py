# SPDX-License-Identifier: Apache-2.0
"""Restore policies: how dispatched rows and pre-activations reach the backward.

Names, numbers and what each takes are the library's (backend/model/restore.c), which the packaging wrote beside this
file. Nothing is loaded, since configs are checked in every process that builds an engine.
"""

from __future__ import annotations

from typing import NamedTuple

from ._restore_table import TABLE

ADAPTIVE = -1  # SLUICE_RESTORE_ADAPTIVE
BY_CHUNK = 255  # SLUICE_RESTORE_BY_CHUNK: a list by chunk says it
BY_CHUNK_NAME = "by chunk"


class Policy(NamedTuple):
    """One row of the table.

    input, pre_activation    whether dispatched rows, and pre-activations, may have it
    device_rows, host_rows   that outlive forward, for each row of a chunk
    exchanges, gemms         of a chunk, once more in backward
    """

    name: str
    number: int
    input: bool
    pre_activation: bool
    device_rows: int
    host_rows: int
    exchanges: int
    gemms: int


def _least(names: dict[str, int]) -> str:
    return next(name for name in names if not POLICIES[name].device_rows + POLICIES[name].host_rows)


POLICIES = {row["name"]: Policy(**row) for row in TABLE["policies"]}
INPUT = {name: one.number for name, one in POLICIES.items() if one.input}
PRE_ACTIVATION = {name: one.number for name, one in POLICIES.items() if one.pre_activation}
# MPipeMoE's names of pairs (input, pre-activation), and the one that keeps everything.
SETS = {row["name"]: (row["input"], row["pre_activation"]) for row in TABLE["sets"]}
KEPT = SETS["none"]
# Of chunks that nothing is kept of.
LEAST = _least(INPUT), _least(PRE_ACTIVATION)


def set_name(pair: object) -> str | None:
    """The papers' name of a pair; None where it has none."""
    return next((name for name, one in SETS.items() if one == pair), None)


def name_of(number: int) -> str | None:
    """As decisions say a number; None where it names no policy."""
    names = {BY_CHUNK: BY_CHUNK_NAME, **{one.number: name for name, one in POLICIES.items()}}
    return names.get(number)


def is_computed_again(name: str) -> bool:
    """Whether a chunk's pre-activations are computed once more in backward; False for what is no policy."""
    return name in POLICIES and POLICIES[name].gemms > 0
