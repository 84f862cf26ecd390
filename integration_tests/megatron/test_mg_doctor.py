# SPDX-License-Identifier: Apache-2.0
"""Tests the findings of `sluice doctor` about Megatron-Core, in processes without the shim."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mg_ranks import NEWEST, OLDEST

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
