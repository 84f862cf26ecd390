# SPDX-License-Identifier: Apache-2.0
"""A plan of layers as Megatron-Core's layout of a pipeline: what `--pipeline-model-parallel-layout` takes.

One letter for each layer, `|` between stages: E the embedding, t a transformer layer, m one of multi-token prediction,
L output and loss. Pure; knows no host.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import stages
from .errors import BadInput

LETTERS = {"embedding": "E", "loss": "L", "mtp": "m"}  # by the name of a layer; any other is a transformer layer
_ORDER = "EtmL"


def layout_of(names: Sequence[str], stage_of: Sequence[int], num_stages: int) -> str:
    """Of layers in the order in which they run. BadInput for what Megatron has no word for. An embedding and a loss
    that are not among the layers lie on the first stage and on the last one."""
    if list(stage_of) != sorted(stage_of):
        raise BadInput("stages of this plan are no runs of layers, and a layout has no word for edges")
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
    """What the plan says and a layout cannot; "": nothing."""
    kinds = sorted({choice.kind for choice in choices if choice.kind in (stages.RECOMPUTE, stages.OFFLOAD)})
    if not kinds:
        return ""
    layers = [str(index) for index, choice in enumerate(choices) if choice.kind in kinds]
    return (
        f"a layout says where layers run, not how: the plan has {' and '.join(kinds)} for layers {', '.join(layers)}; "
        "see Megatron's --recompute-method and --recompute-num-layers"
    )
