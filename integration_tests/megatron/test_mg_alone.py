# SPDX-License-Identifier: Apache-2.0
"""Tests without ranks and without the shim: the findings of `sluice doctor` about Megatron-Core, and routes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mg_ranks import NEWEST, OLDEST
from sluice.adapters.megatron import routes

ASK = "import json; from sluice import doctor; print(json.dumps([vars(each) for each in doctor._megatron()]))"


@pytest.mark.parametrize(
    "release, state, words",
    [
        (OLDEST, "ok", "sluice.megatron moe_block_spec"),
        (NEWEST, "note", "triton"),  # which releases since 0.18 need
    ],
)
def test_Doctor_EachRelease_NamesItAndTheHookOrWhyItDoesNotImport(release: str, state: str, words: str) -> None:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    if release == NEWEST:
        environment["PYTHONPATH"] = str(Path(sys.prefix) / f"megatron-{release}")
    command = [sys.executable, "-W", "ignore", "-c", ASK]
    said = subprocess.run(command, env=environment, cwd=sys.prefix, stdout=subprocess.PIPE, check=True, timeout=300)
    (found,) = json.loads(said.stdout.splitlines()[-1])
    assert found["state"] == state and release in found["detail"] and words in found["detail"], found


def test_Routes_ChosenWithProbabilityZero_StayWithTheirGradient() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0]], requires_grad=True)
    found = routes.of_map(probs, torch.tensor([[True, True, False]]), 2)
    assert found.expert_ids.tolist() == [[0, 1]]
    (found.weights * torch.tensor([[3.0, 5.0]])).sum().backward()
    assert probs.grad.tolist() == [[3.0, 5.0, 0.0]]
