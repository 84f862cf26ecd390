# SPDX-License-Identifier: Apache-2.0
"""Tests that the machine in docs/tuning.md is valid, and that its table has every field of a machine."""

import json
import re
from pathlib import Path

import pytest
from sluice._library import load
from sluice.errors import InvalidArgument

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "tuning.md").read_text()
MACHINE = next(block for block in re.findall(r"```json\n(.*?)```", PAGE, re.S) if "sluice_machine" in block)


def _read(machine: str) -> None:
    library = load()
    out = library.ffi.new("sluice_planner_t **")
    library.check(library.lib.sluice_planner_create(machine.encode(), len(machine.encode()), out))
    library.lib.sluice_planner_destroy(out[0])


def test_Example_AsPrinted_IsAMachine():
    _read(MACHINE)


def test_Table_HasEveryFieldThatTheLibraryKnows():
    with pytest.raises(InvalidArgument) as refused:
        _read(json.dumps({**json.loads(MACHINE), "no_such_field": 1}))
    known = set(re.findall(r"[a-z_]+", str(refused.value).split("known are ", 1)[1]))
    table = PAGE.split("| field | meaning |")[1].split("\n\n")[0]
    rows = {name for line in table.splitlines()[2:] for name in re.findall(r"`([a-z_]+)", line.split("|")[1])}
    assert len(known) > 20 and rows == known - {"name"}
