# SPDX-License-Identifier: Apache-2.0
"""Converts a plan of layers to the value of Megatron-Core's `--pipeline-model-parallel-layout`.

The layout has one letter for each layer and `|` between stages: E embedding, t transformer layer, m multi-token
prediction, L output and loss. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import stages
from .errors import BadInput

LETTERS = {"embedding": "E", "loss": "L", "mtp": "m"}  # by the name of a layer; any other is a transformer layer
_ORDER = "EtmL"


def layout_of(names: Sequence[str], stage_of: Sequence[int], num_stages: int) -> str:
    """Returns the layout of layers in the order in which they run. Raises BadInput for a plan that a layout cannot
    express. If embedding and loss are not among the layers, they are put on the first and on the last stage."""
    if list(stage_of) != sorted(stage_of):
        raise BadInput("stages of this plan are not runs of consecutive layers, which a layout cannot express")
    rows = ["".join(LETTERS.get(name, "t") for name, at in zip(names, stage_of) if at == s) for s in range(num_stages)]
    letters = "".join(rows)
    if "E" not in letters:
        rows[0] = "E" + rows[0]
    if "L" not in letters:
        rows[-1] += "L"
    letters = "".join(rows)
    order = [_ORDER.index(letter) for letter in letters]
    if order != sorted(order) or letters.count("E") > 1 or letters.count("L") > 1:
        raise BadInput(
            f"the layers are {letters} in Megatron's letters: one embedding first, transformer layers, then layers "
            'named "mtp", one "loss" last'
        )
    return "|".join(rows)


def lost_in(choices: Sequence[stages.Choice]) -> str:
    """Returns a sentence about the part of the plan that a layout cannot express; "": there is none."""
    kinds = sorted({choice.kind for choice in choices if choice.kind in (stages.RECOMPUTE, stages.OFFLOAD)})
    if not kinds:
        return ""
    layers = [str(index) for index, choice in enumerate(choices) if choice.kind in kinds]
    return (
        f"a layout defines where layers run, not how: the plan has {' and '.join(kinds)} for layers "
        f"{', '.join(layers)}; see Megatron's --recompute-method and --recompute-num-layers"
    )
