"""What Python says of ops is what the table in backend/schedule/op_table.c says: letters in pictures, exchanges."""

import ast
import os
import re
import subprocess

import pytest
from test_documents import ROOT, literal, text

KINDS = re.compile(r"^  SLUICE_OP_(\w+)\b", re.MULTILINE)
ROWS = re.compile(r'\[SLUICE_OP_(\w+)\] = \{\.name = "(\w+)", \.letter = "([^"]+)",(.*?)\},$', re.MULTILINE | re.DOTALL)


def kinds(header):
    body = header.split("typedef enum sluice_op_kind_e {", 1)[1].split("} sluice_op_kind_t", 1)[0]
    return [kind for kind in KINDS.findall(body) if kind != "COUNT"]


def rows(table):
    """name: (letter, the rest of the row)."""
    return {name: (letter, rest) for _, name, letter, rest in ROWS.findall(table)}


def schedule(name):
    return text("backend", "schedule", name)


def wrong_letters(table, short):
    """Ops whose letter is another in pictures, or that are on one side alone."""
    wanted = {name: letter for name, (letter, _) in rows(table).items()}
    drawn = {name: letter for name, letter in short.items() if " " not in name}  # "copy_out T_DI": one op, two labels
    return sorted(name for name in wanted.keys() | drawn.keys() if wanted.get(name) != drawn.get(name))


def short():
    return ast.literal_eval(literal(os.path.join("timeline", "svg.py"), "SHORT"))


def test_Rows_AreReadOfEveryKind():
    found = [kind for kind, *_ in ROWS.findall(schedule("op_table.c"))]
    assert found == kinds(schedule("schedule.h")) and len(found) > 20


def test_EveryOp_HasItsLetterInPictures():
    assert wrong_letters(schedule("op_table.c"), short()) == []


@pytest.mark.parametrize("letter", ["F", "S"])
def test_OpWithoutALetterInPictures_IsFound(letter):
    row = f'    [SLUICE_OP_FAKE] = {{.name = "fake", .letter = "{letter}",\n        .lane = ON(COMM)}},\n'
    table = schedule("op_table.c").replace("};\n/* clang-format on */", row + "};\n/* clang-format on */")
    assert wrong_letters(table, short()) == ["fake"]


def test_LetterOfNoOp_IsFound():
    assert wrong_letters(schedule("op_table.c"), short() | {"gone": "g"}) == ["gone"]


@pytest.mark.parametrize("direction", ["FORWARD", "BACKWARD"])
def test_Exchanges_AreThoseOfTheTable(direction):
    stands = re.compile(rf"\.passes = ({direction}|BOTH)")
    of_pass = [name for name, (_, rest) in rows(schedule("op_table.c")).items() if stands.search(rest)]
    exchanges = {name for name in of_pass if ".is_exchange = 1" in rows(schedule("op_table.c"))[name][1]}
    assert set(ast.literal_eval(literal(os.path.join("tracing", "passes.py"), f"{direction}_EXCHANGES"))) == exchanges


def test_Recipe_NamesFilesThatAreThere():
    recipe = text("docs", "schedule.md").split("## Adding an op", 1)[1].split("\n## ", 1)[0]
    named = re.findall(r"`([\w/]+\.(?:c|h|py))`", recipe)
    assert len(named) > 10
    assert [path for path in named if not os.path.exists(os.path.join(ROOT, path))] == []


# Product files that ask for one op of today and that a new one need not touch.
ASKING = {"backend/moe/pass/weight_sums.c": "whether weight gradients are computed once or by chunk"}


def files_that_name_a_kind(found):
    """Of the product, among the lines of `git grep` (file:kind): without tests and constants that are no kinds."""
    named = [line.split(":") for line in found.splitlines() if line]
    known = {f"SLUICE_OP_{kind}" for kind in kinds(schedule("schedule.h"))}
    return {path for path, kind in named if kind in known and "/test/" not in path}


def test_Recipe_NamesEveryFileThatKnowsOps():
    command = ["git", "grep", "-o", "-E", r"SLUICE_OP_[A-Z0-9_]+", "--", "backend", "capi"]
    found = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    recipe = text("docs", "schedule.md").split("## Adding an op", 1)[1].split("\n## ", 1)[0]
    paths = files_that_name_a_kind(found)
    assert len(paths) > 8 and ASKING.keys() <= paths
    assert [path for path in sorted(paths - ASKING.keys()) if f"`{path}`" not in recipe] == []


def test_FileThatKnowsOps_IsFound():
    lines = "backend/a.c:SLUICE_OP_GEMM1\nbackend/a.c:SLUICE_OP_COUNT\nbackend/b.c:SLUICE_OP_COUNT\n"
    lines += "backend/test/c_test.c:SLUICE_OP_GEMM1\n"
    assert files_that_name_a_kind(lines) == {"backend/a.c"}
