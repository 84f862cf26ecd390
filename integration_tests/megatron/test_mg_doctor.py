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


def ask(release: str) -> dict[str, str]:
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    if release != OLDEST:
        environment["PYTHONPATH"] = str(Path(sys.prefix) / f"megatron-{release}")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK],
        env=environment,
        cwd=Path(sys.prefix),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done
    (found,) = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def test_Doctor_ReleaseThatFits_NamesItAndTheHook() -> None:
    found = ask(OLDEST)
    assert found["state"] == "ok" and OLDEST in found["detail"] and "sluice.megatron moe_block_spec" in found["detail"]


def test_Doctor_ReleaseThatDoesNotImport_SaysWhy() -> None:
    """Releases since 0.18 need triton."""
    try:
        import triton  # noqa: F401
    except ImportError:
        found = ask(NEWEST)
        assert found["state"] == "note" and NEWEST in found["detail"] and "triton" in found["detail"], found
    else:
        pytest.skip("triton is installed here")
