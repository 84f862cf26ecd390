# SPDX-License-Identifier: Apache-2.0
"""Tests plans of layers in Megatron's layout: letters, refusals, and the command that prints it."""

import re

import pytest
from sluice.planning.errors import BadInput
from sluice.planning.megatron_layout import layout_of

LAYER = {
    **{"forward_seconds": 2e-3, "backward_seconds": 4e-3, "recompute_seconds": 2e-3, "activation_bytes": "100MiB"},
    **{"checkpoint_bytes": "10MiB", "output_bytes": "10MiB"},
}
EMBEDDING = {**LAYER, "name": "embedding", "forward_seconds": 1e-5, "backward_seconds": 1e-5}
LOSS = {**LAYER, "name": "loss", "forward_seconds": 6e-3, "backward_seconds": 12e-3}


def _printed(plan, layers: list, *words: str) -> tuple[int, str, str]:
    model = {"sluice_stages": 1, "stages": 4, "micro_batches": 8, "layers": layers}
    return plan("--stages", model, "--layout", "megatron", *words)


def test_Layout_OfLayers_IsALetterEach() -> None:
    names = ["embedding", "block", "block", "block", "mtp", "loss"]
    assert layout_of(names, [0, 0, 1, 1, 2, 2], 3) == "Et|tt|mL"
    assert layout_of(["a", "b", "c"], [0, 1, 1], 2) == "Et|ttL"
    assert layout_of(["embedding", "b", "c"], [0, 1, 2], 3) == "E|t|tL"


@pytest.mark.parametrize(
    ("names", "stage_of", "words"),
    [
        (["a", "b", "c"], [0, 1, 0], "not runs of consecutive layers"),
        (["a", "embedding", "c"], [0, 0, 1], "one embedding first"),
        (["embedding", "embedding", "c"], [0, 0, 1], "one embedding first"),
        (["mtp", "b", "loss"], [0, 0, 1], 'then layers named "mtp"'),
    ],
)
def test_Layout_WhatMegatronHasNoWordFor_IsRefused(names: list[str], stage_of: list[int], words: str) -> None:
    with pytest.raises(BadInput, match=re.escape(words)):
        layout_of(names, stage_of, 2)


def test_Command_Layout_IsThePartitionOfThePlan(plan) -> None:
    layers = [EMBEDDING, {**LAYER, "name": "block", "repeat": 13}, LOSS]
    assert _printed(plan, layers) == (0, "Etttt|tttt|tttt|tL\n", "")  # the loss is as slow as three layers


def test_Command_LayoutUnderABudget_SaysWhatItCannotSay(plan) -> None:
    status, out, err = _printed(plan, [{**LAYER, "name": "block", "repeat": 8}], "--budget", "700MiB")
    assert status == 0 and out == "Ett|tt|tt|ttL\n"
    assert "the plan has recompute for layers 0" in err
    status, out, err = _printed(plan, [{**LAYER, "name": "block", "repeat": 8}], "--budget", "1MiB")
    assert (status, out) == (1, "") and "DOES NOT FIT" in err
