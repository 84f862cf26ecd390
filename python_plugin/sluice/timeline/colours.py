# SPDX-License-Identifier: Apache-2.0
"""Defines the colours of all pictures and their meanings: all drawing code takes colours and legends from here.

A colour means the same in each picture, and any two colours with a meaning differ visibly; both are tested.
"""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    """Describes a colour, and its text in a legend."""

    colour: str
    words: str


# Colours of a numbered series: chunks, micro-batches, or curves, which have their own legend. They are distinct for
# most eyes and in grey; from ten on they repeat.
NUMBERED = (
    "#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#8cd17d",
)  # fmt: skip
ALL_CHUNKS = Mark("#8a8a8a", "all chunks")

COPIES = Mark("#9467bd", "copies to and from host memory")
# Ops by the letter of the papers.
OPS = {
    "S": Mark("#2f7ed8", "S = dispatch"),
    "C": Mark("#ffb000", "C = computation"),
    "R": Mark("#1b7a3d", "R = combine"),
    "M": COPIES._replace(words="M = copy"),
}
OTHER_OP = Mark("#c4b8a8", "other ops")

KEPT, MOE = Mark("#393b79", "keep"), Mark("#ad494a", "MoE")
# How a layer's backward gets its activations.
POLICIES = {
    "keep": KEPT,
    "recompute": Mark("#bd9e39", "recompute"),
    "offload": COPIES._replace(words="offload"),
    "mixed": Mark("#7b4173", "mixed"),
    "MoE": MOE,
}
# The parts of a stage's bytes, by the names of sluice_stages_stage_t.
PARTS = {
    "base": Mark("#3b3b3b", "on each stage"),
    "parameter": Mark("#17becf", "parameters"),
    "state": Mark("#6b6ecf", "gradients and optimizer"),
    "message": Mark("#637939", "messages"),
    "resident": Mark("#8c6d31", "resident"),
    "held": KEPT._replace(words="micro-batches in flight"),
    "working": Mark("#e377c2", "while a layer runs"),
    "staging": COPIES._replace(words="copies in progress"),
    "arena": MOE._replace(words="slots of MoE layers"),
}

BYTES, BYTES_EDGE = "#cfd8e3", "#5b6b7f"
LIMIT = "#bb0000"  # a budget, or reserved bytes
# These colours have no meaning.
LINE, GRID, PAPER, LANE, SLOT = "#555555", "#bbbbbb", "#ffffff", "#f3f3f3", "#fafafa"

# Tensors of the slots, in the words of docs/glossary.md.
TENSORS = {
    "T_SEND": "rows to be sent",
    "T_NODE": "rows from other nodes",
    "T_RECV": "rows as received",
    "T_DI": "dispatched input",
    "T_M": "pre-activations",
    "T_ACT": "activated rows",
    "T_DO": "expert outputs",
    "T_ROUTE": "route weights",
    "T_COPY_WEIGHTS": "route weights of token copies",
    "T_LOW": "rows times a factor of an adapter",
    "dT_DO": "gradient of T_DO",
    "dT_ACT": "gradient of T_ACT",
    "dT_M": "gradient of T_M",
    "dT_DI": "gradient of T_DI",
    "dGATE": "gradient of the gate",
    "kept T_DI": "T_DI kept for the backward",
    "kept T_M": "T_M kept for the backward",
    "host T_DI": "T_DI in host memory",
    "host T_M": "T_M in host memory",
}


def numbered(number: int) -> str:
    """Returns the colour of the chunk, micro-batch or curve with this number."""
    return NUMBERED[number % len(NUMBERED)]
