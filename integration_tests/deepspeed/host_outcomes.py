# SPDX-License-Identifier: Apache-2.0
"""Reads the outcomes of a host's own tests from pytest's report."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path


def outcomes_of(report: Path) -> dict[str, str]:
    """Returns for each test "passed", "skipped: why", or the kind of failure."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = next((f"{each.tag}: {each.get('message')}" for each in case if each.tag != "system-out"), "passed")
        found[f"{case.get('classname')}::{case.get('name')}"] = outcome.splitlines()[0][:200]
    return found
