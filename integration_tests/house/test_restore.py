# SPDX-License-Identifier: Apache-2.0
"""Tests that only the table of backend/model/restore.c defines restore policies: other code reads names, numbers and
costs from this table, and Python from data that the packaging reads from the library."""

import re
import subprocess

from test_documents import ROOT, text

ROW = re.compile(r'\[SLUICE_RESTORE_(\w+)\] = \{\.name = "(\w+)"')
TABLE = "backend/model/restore.c"
PLACES = ("backend", "capi/src", "capi/include", "python_plugin", "adapters")
ENDINGS = (".c", ".h", ".cu", ".py")
ASIDE = re.compile(r"(^|/)(test|cts|bench|fake)/")


def names():
    """Returns {name: enumerator} of the table's rows."""
    return {name: kind for kind, name in ROW.findall(text(*TABLE.split("/")))}


# Places outside of the table that may name a policy: the path, the name, and the reason.
ALLOWED = {
    "backend/schedule/op_table.c": (["recompute", "redispatch"], "names of ops, which policies add"),
    "backend/schedule/serial/serial.c": (["keep"], "the field of a spec that says whether a backward follows"),
    "backend/schedule/serial/serial_json.c": (["keep"], "likewise, as JSON"),
    "backend/schedule/template/template_backward.c": (
        ["KEEP"],
        "a chunk that is not read needs no slot, as one that is kept",
    ),
    "backend/model/restore.h": (["KEEP"], "what a layer does where nobody chooses"),
    "backend/planner/stages/explain.c": (
        ["keep", "offload", "recompute"],
        "options of any layer, after vPipe: what is done with its activations, not with the tensors of a MoE layer",
    ),
    "backend/planner/stages/explain.h": (["keep", "offload", "recompute"], "likewise"),
    "python_plugin/sluice/planning/stages.py": (["keep", "offload", "recompute"], "likewise"),
    "python_plugin/sluice/planning/stages_picture.py": (["recompute"], "likewise"),
    "python_plugin/sluice/timeline/colours.py": (["keep", "offload", "recompute"], "likewise, their colours"),
    "capi/include/sluice/moe.h": (sorted(names().values()), "the public numbers, all of them"),
    "capi/include/sluice/planner.h": (["KEEP"], "where the numbers stand, for a reader of the field"),
    "capi/include/sluice/schedule.h": (["KEEP"], "where the numbers stand, for a reader of the field"),
    "adapters/deepspeed/pipeline/takeover.py": (["offload"], "a key of stats(), of layers that a plan offloads"),
    "adapters/transformers/experts.py": (["keep", "redispatch"], "an adapter's own choice for one rank"),
    "python_plugin/sluice/timeline/__init__.py": (["recompute", "redispatch"], "an example for its readers"),
    "python_plugin/sluice/timeline/svg.py": (["recompute", "redispatch"], "short names of ops, see test_ops.py"),
    "python_plugin/sluice/tracing/passes.py": (["recompute", "redispatch"], "kinds of ops that a pass ran"),
}


def named_in(source, known):
    """Returns the policies that a text names, as quoted words or as enumerators."""
    quoted = set(re.findall(r"""["']([\w-]+)\\?["']""", source)) & known.keys()
    numbers = set(re.findall(r"\bSLUICE_RESTORE_(\w+)\b", source)) & set(known.values())
    return sorted(quoted | numbers)


def tracked(endings, *places):
    listed = subprocess.run(["git", "ls-files", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.split() if path.endswith(endings)]


def found():
    known = names()
    assert len(known) == text(*TABLE.split("/")).count("] = {.name") >= 4
    paths = [path for path in tracked(ENDINGS, *PLACES) if not ASIDE.search(path)]
    assert len(paths) > 300
    at = {path: named_in(text(*path.split("/")), known) for path in paths if path != TABLE}
    return {path: policies for path, policies in at.items() if policies}


def test_Policies_AreNamedInTheTableAlone():
    assert found() == {path: policies for path, (policies, _) in ALLOWED.items()}
