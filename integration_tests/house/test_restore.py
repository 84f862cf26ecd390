"""What Python says of restore policies is what the table in backend/model/restore.c says."""

import ast
import os
import re

import pytest
from test_documents import literal, text

ROW = re.compile(r'\[SLUICE_RESTORE_(\w+)\] = \{\.name = "(\w+)", \.word = "[^"]+", \.tensors = ([DIM |]+),')
SET = re.compile(r'^    \{"(\w+)", SLUICE_RESTORE_(\w+), SLUICE_RESTORE_(\w+)\},$', re.MULTILINE)
NUMBER = re.compile(r"^  SLUICE_RESTORE_(\w+) = (-?\d+)", re.MULTILINE)


def table():
    return text("backend", "model", "restore.c")


def policies(tensor):
    """{name: number} of a tensor, DI or M."""
    numbers = dict(NUMBER.findall(text("capi", "include", "sluice", "moe.h")))
    rows = ROW.findall(table())
    assert len(rows) == table().count("] = {.name") >= 4
    return {name: int(numbers[kind]) for kind, name, tensors in rows if tensor in tensors.split(" | ")}


def sets():
    names = {kind: name for kind, name, _ in ROW.findall(table())}
    return {name: (names[di], names[m]) for name, di, m in SET.findall(table())}


def said(module, name):
    return ast.literal_eval(literal(os.path.normpath(os.path.join("..", "..", module)), name))


CONFIG, SCHEDULE = "python_plugin/sluice/config.py", "python_plugin/sluice/timeline/schedule.py"
LAYER, TUNER = "adapters/torch/layer.py", "adapters/torch/tuner.py"


@pytest.mark.parametrize(("name", "tensor"), [("RESTORE_INPUT", "DI"), ("RESTORE_MIDDLE", "M")])
def test_Policies_AreThoseOfTheTable(name, tensor):
    assert list(said(CONFIG, name)) == list(policies(tensor))
    assert said(SCHEDULE, name) == policies(tensor)
    assert said(LAYER, name) == {"adaptive": -1, **policies(tensor)}


def test_NamedSets_AreThoseOfTheTable():
    assert said(CONFIG, "RESTORE") == said(SCHEDULE, "POLICIES") == sets()
    assert len(sets()) == 5


def test_DecisionsNames_AreThoseOfTheTableInOrder():
    by_number = {number: name for tensor in ("DI", "M") for name, number in policies(tensor).items()}
    assert said(TUNER, "_RESTORE") == (*(by_number[number] for number in sorted(by_number)), "by chunk")
