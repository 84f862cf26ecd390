# SPDX-License-Identifier: Apache-2.0
"""Tests the allowed uses on the build graph, on the `#include` lines, and on the imports of the package."""

import os

import build_comments
import cycles
import layering
import pytest
import python_imports
from layering import Edge


def test_BuildGraph_HasNoForbiddenEdge(root):
    edges = layering.bazel_edges(root)
    assert any(edge.target == "backend/base" for edge in edges), "the query saw no backend at all"
    found = layering.violations(edges)
    assert not found, "\n".join(found)


def test_Includes_HaveNoForbiddenEdge(root):
    edges = layering.include_edges(root)
    assert any(edge.target == "backend/base" for edge in edges), "no include of backend/base was seen"
    found = layering.violations(edges)
    assert not found, "\n".join(found)


def test_Tests_LieNextToTheFolderThatTheyTest(root):
    edges = layering.include_edges(root)
    found = layering.misplaced_tests(edges)
    assert not found, "\n".join(found)
    stale = layering.ASKING - {(edge.why.split(" ")[0], layering._area(edge.target)[0]) for edge in edges}
    assert not stale, f"no longer ask such a folder: {sorted(stale)}"


def test_Folders_SayWhatTheyAreAndWhomTheyUse(root):
    texts = build_comments.build_files(root)
    assert {"backend/base", "backend/comm/nccl", "backend/cts/comm"} <= set(texts)
    found = build_comments.violations(texts, layering.bazel_edges(root) + layering.include_edges(root))
    assert not found, "\n".join(found)


def test_Units_IncludeEachOtherInNoCycle(root):
    edges = cycles.includes(root)
    seen = {cycles.unit(edge.source) for edge in edges}
    assert {"backend/base/alloc", "capi/src/context", "adapters/torch/c10d_comm", "examples/c/rank"} <= seen
    found = cycles.violations(edges)
    assert not found, "\n".join(found)


def test_Imports_OfEachAreaOfThePackage_AreAllowed(root):
    edges = python_imports.imports(root)
    seen = {(python_imports.area(edge.source), python_imports.area(edge.target)) for edge in edges}
    assert {("megatron", "torch"), ("planning", "torch"), ("front", "base"), ("deepspeed", "deepspeed/moe")} <= seen
    found = python_imports.violations(edges)
    assert not found, "\n".join(found)
    unused = {(a, b) for a, uses in python_imports.MAY_USE.items() for b in uses} - seen
    assert not unused, f"allowed, and no import is of that kind: {sorted(unused)}"


def test_Modules_ImportEachOtherInNoCircle(root):
    found = cycles.violations(python_imports.imports(root), "modules import")
    assert not found, "\n".join(found)


# ---- one planted fault for each rule ----


@pytest.mark.parametrize(
    "edge",
    [
        Edge("backend/base", "backend/device"),
        Edge("backend/moe", "backend/comm/local"),
        Edge("backend/unknown", "backend/base"),
        Edge("backend/moe", "backend/cts"),
        Edge("backend/comm", "backend/moe/test"),
        Edge("backend/moe", "capi/src"),
        Edge("backend/moe", "capi", why="//backend/moe uses //capi:libsluice.so.0"),
        Edge("capi", "backend/device/cuda", why="//capi:api uses //backend/device/cuda:fake"),
        Edge("capi/src", "adapters/torch"),
        Edge("examples/c", "capi/src"),
    ],
    ids=lambda edge: f"{edge.source}-to-{edge.target}".replace("/", "_"),
)
def test_PlantedEdge_IsFound(edge):
    assert len(layering.violations([Edge("backend/comm", "backend/base"), edge])) == 1


def test_PlantedTestAwayFromItsFolder_IsFound():
    file, header = "capi/test/x_test.c", "backend/moe/routing/binding.h"
    edge = Edge(os.path.dirname(file), os.path.dirname(header), True, f"{file} includes {header}")
    assert layering.misplaced_tests([edge]) == [f"{file} includes {header}: a test of backend/moe belongs there"]


def test_PlantedUseThatTheFolderDoesNotState_IsFound():
    folder = '# A folder.\n# May use: base,\n# comm/host.\nsluice_cc_library(\n    name = "x",\n)\n'
    texts = {
        "backend/base": folder,
        "backend/comm": folder,
        "backend/x": folder,
        "backend/y": folder.replace("May use", "Uses"),
    }
    edges = [Edge("backend/x", "backend/base"), Edge("backend/x/kernels", "backend/comm", why="x.c includes comm.h")]
    unsaid, silent = build_comments.violations(texts, edges)[::-1]
    assert unsaid == "backend/x/BUILD does not say that it may use backend/comm (x.c includes comm.h)"
    assert "begin with a comment" in silent


def _plant(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_PlantedCycleOfIncludes_IsFoundWithItsIncludes(tmp_path):
    """A source alone makes the cycle: headers do not include each other, so the code compiles."""
    files = {
        "backend/a/a.h": "",
        "backend/a/a.c": '#include "backend/a/a.h"\n#include "backend/b/b.h"\n',
        "backend/b/b.h": '#include "../a/a.h"\n',
        "capi/src/c.c": '#include "backend/b/b.h"\n',
    }
    _plant(tmp_path, files)
    (message,) = cycles.violations(cycles.includes(str(tmp_path)))
    head, *lines = message.split("\n")
    assert "2 units include each other in a cycle: backend/a/a, backend/b/b" in head
    chain = ["backend/a/a.c includes backend/b/b.h", "backend/b/b.h includes backend/a/a.h"]
    assert sorted(line.strip() for line in lines) == chain


def test_PlantedImports_ForbiddenAndCircular_AreFoundInEveryForm(tmp_path):
    files = {
        "python_plugin/sluice/trace.py": "def f():\n    from . import settings\n",
        "python_plugin/sluice/settings.py": "import sluice.trace\n",
        "adapters/torch/layer.py": "from ... import trace\nfrom ..deepspeed import hook\n",
        "adapters/deepspeed/hook.py": "",
        "adapters/deepspeed/test/test_x.py": "from sluice.adapters.torch import layer\n",
    }
    _plant(tmp_path, files)
    edges = python_imports.imports(str(tmp_path))
    (forbidden,) = python_imports.violations(edges)
    assert forbidden.startswith("adapters/torch/layer.py:2 imports") and "not deepspeed" in forbidden
    (circle,) = cycles.violations(edges, "modules import")
    assert circle.startswith("2 modules import each other in a cycle")
    assert "trace.py:2 imports python_plugin/sluice/settings.py" in circle
