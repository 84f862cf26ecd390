# SPDX-License-Identifier: Apache-2.0
"""Runs a host's own tests in processes of their own, and compares their outcomes with and without Sluice."""

import collections
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def outcomes(
    root: str | None, words: list[str], folder: Path, ranks: int = 1, **environment: str
) -> list[dict[str, str]]:
    """Runs pytest with these arguments in `root` on each rank. Returns for each rank a dict from test to "passed",
    "skipped: why" or the kind of failure. folder: where reports and logs are written."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "SLUICE"))}
    folder.mkdir(exist_ok=True)
    reports = [folder / f"report{rank}.xml" for rank in range(ranks)]
    processes = []
    for rank, report in enumerate(reports):
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *words]
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
        with report.with_suffix(".log").open("wb") as log:
            processes.append(
                subprocess.Popen(command, cwd=root, env={**plain, **environment, **own}, stdout=log, stderr=log)
            )
    try:
        for process in processes:
            process.wait()
    finally:  # also at the deadline of the test
        for process in processes:
            process.kill()
    logs = [report.with_suffix(".log").read_text(errors="replace")[-4000:] for report in reports]
    assert all(report.exists() for report in reports), logs
    return [_read(report) for report in reports]


def _read(report: Path) -> dict[str, str]:
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((f"{each.tag}: {each.get('message')}" for each in case if each.tag != "system-out"), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome.splitlines()[0][:200]
    return found


def printed(stock: dict[str, str], ours: dict[str, str], ran: Path) -> collections.Counter[str]:
    """Prints both outcomes of each test. Prints and returns how often each test ran on Sluice, which wrote their names
    to the file `ran`."""
    for name, outcome in stock.items():
        print(f"{name}: stock {outcome} | Sluice {ours.get(name)}")
    counts = collections.Counter(ran.read_text().splitlines())
    for name, count in sorted(counts.items()):
        print(f"on Sluice {count} times: {name}")
    return counts
