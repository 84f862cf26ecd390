# SPDX-License-Identifier: Apache-2.0
"""Tests that Python's data about ops matches backend/schedule/op_table.c: letters in pictures, exchanges."""

import ast
import os
import re

import pytest
from test_documents import literal, text

KINDS = re.compile(r"^  SLUICE_OP_(\w+)\b", re.MULTILINE)
ROWS = re.compile(r'\[SLUICE_OP_(\w+)\] = \{\.name = "(\w+)", \.letter = "([^"]+)",(.*?)\},$', re.MULTILINE | re.DOTALL)


def kinds(header):
    body = header.split("typedef enum sluice_op_kind_e {", 1)[1].split("} sluice_op_kind_t", 1)[0]
    return [kind for kind in KINDS.findall(body) if kind != "COUNT"]


def rows(table):
    """Returns {name: (letter, the rest of the row)}."""
    return {name: (letter, rest) for _, name, letter, rest in ROWS.findall(table)}


def schedule(name):
    return text("backend", "schedule", name)


def test_Rows_AreReadOfEveryKind():
    found = [kind for kind, *_ in ROWS.findall(schedule("op_table.c"))]
    assert found == kinds(schedule("schedule.h")) and len(found) > 20


def test_EveryOp_HasItsLetterInPictures():
    short = ast.literal_eval(literal(os.path.join("timeline", "svg.py"), "SHORT"))
    drawn = {name: letter for name, letter in short.items() if " " not in name}  # "copy_out T_DI": one op, two labels
    assert drawn == {name: letter for name, (letter, _) in rows(schedule("op_table.c")).items()}


def test_EveryTensorOfASlot_HasWordsInPictures():
    named = set(ast.literal_eval(literal(os.path.join("timeline", "colours.py"), "TENSORS")))
    tensors = set(re.findall(r'\[SLUICE_T_\w+\] = \{"([^"]+)"', schedule("tensor_table.c")))
    assert len(tensors) > 15 and tensors - {"T_OUT", "dW"} == named  # those two are the host's own


@pytest.mark.parametrize("direction", ["FORWARD", "BACKWARD"])
def test_Exchanges_AreThoseOfTheTable(direction):
    stands = re.compile(rf"\.passes = ({direction}|BOTH)")
    of_pass = [name for name, (_, rest) in rows(schedule("op_table.c")).items() if stands.search(rest)]
    exchanges = {name for name in of_pass if ".is_exchange = 1" in rows(schedule("op_table.c"))[name][1]}
    assert set(ast.literal_eval(literal(os.path.join("tracing", "passes.py"), f"{direction}_EXCHANGES"))) == exchanges
