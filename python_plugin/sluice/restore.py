# SPDX-License-Identifier: Apache-2.0
"""Has the restore policies: how the backward obtains dispatched rows and pre-activations.

Names, numbers and costs come from the library (backend/model/restore.c): the packaging writes them into a file next to
this one. The library is not loaded, since every process that builds an engine checks configs.
"""

from __future__ import annotations

from typing import NamedTuple

from ._restore_table import TABLE

ADAPTIVE = -1  # SLUICE_RESTORE_ADAPTIVE
BY_CHUNK = 255  # SLUICE_RESTORE_BY_CHUNK: a list has the policy of each chunk
BY_CHUNK_NAME = "by chunk"


class Policy(NamedTuple):
    """Describes one row of the table.

    input, pre_activation    whether the policy is possible for dispatched rows, and for pre-activations
    device_rows, host_rows   rows kept from forward to backward, per row of a chunk
    exchanges, gemms         exchanges and GEMMs of a chunk that backward repeats
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
# MPipeMoE's names of pairs (input, pre-activation), and the pair that keeps everything.
SETS = {row["name"]: (row["input"], row["pre_activation"]) for row in TABLE["sets"]}
KEPT = SETS["none"]
# The policies with the fewest kept rows.
LEAST = _least(INPUT), _least(PRE_ACTIVATION)


def set_name(pair: object) -> str | None:
    """Returns the papers' name of a pair; None if it has none."""
    return next((name for name, one in SETS.items() if one == pair), None)


def name_of(number: int) -> str | None:
    """Returns the name of a number in a decision; None if the number is no policy."""
    names = {BY_CHUNK: BY_CHUNK_NAME, **{one.number: name for name, one in POLICIES.items()}}
    return names.get(number)


def is_computed_again(name: str) -> bool:
    """Returns whether backward recomputes a chunk's pre-activations; False if `name` is no policy."""
    return name in POLICIES and POLICIES[name].gemms > 0
