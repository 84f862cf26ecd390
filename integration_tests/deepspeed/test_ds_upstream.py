"""The host's own tests of its pipeline engine, unmodified: each has the outcome that it has beside stock.

Their files are not part of this project: SLUICE_DEEPSPEED_TESTS names the folder "tests" of its repository, without the
package beside it, which would be imported in place of the installed one. What they need and is not here they skip.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

TESTS = os.environ.get("SLUICE_DEEPSPEED_TESTS")
SWITCH = Path(__file__).resolve().parent / "upstream"
FILES = ("unit/runtime/pipe/test_pipe.py", "unit/runtime/pipe/test_pipe_schedule.py")
SECTION = {"enabled": True, "on_unsupported": "warn", "pipeline": {}}

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not TESTS, reason="SLUICE_DEEPSPEED_TESTS does not name the folder of the host's tests"),
]


def _outcomes(folder: Path, file: str, **environment: str) -> dict[str, str]:
    """By test: "passed", "skipped: why", or the kind of failure."""
    report = folder / "report.xml"
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    own = {
        "PYTHONPATH": str(SWITCH),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "LOCAL_SIZE": "4",
        "TORCHDYNAMO_DISABLE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", file]
    done = subprocess.run(command, cwd=str(TESTS), env={**plain, **own, **environment}, capture_output=True, text=True)
    assert report.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((f"{each.tag}: {each.get('message')}" for each in case if each.tag != "system-out"), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome.splitlines()[0][:200]
    return found


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("file", FILES)
def test_HostsOwnTests_WithTheSwitchOn_HaveStocksOutcomes(file: str, tmp_path: Path) -> None:
    batches = tmp_path / "batches"
    batches.touch()
    stock = _outcomes(tmp_path, file, SLUICE="0")
    ours = _outcomes(
        tmp_path,
        file,
        SLUICE_TEST_SECTION=json.dumps(SECTION),
        SLUICE_TEST_BATCHES=str(batches),
    )
    for name, outcome in stock.items():
        print(f"{name}: stock {outcome} | Sluice {ours.get(name)}")
    print(f"{batches.stat().st_size} batches through Sluice")
    assert stock and ours == stock
    if file.endswith("test_pipe.py"):
        assert any(outcome == "passed" for outcome in stock.values())
        assert batches.stat().st_size > 0
