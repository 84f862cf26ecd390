# SPDX-License-Identifier: Apache-2.0
"""Tests the allowed uses on the build graph, on the `#include` lines, and on the imports of the package."""

import os

import build_comments
import cycles
import layering
import pytest
import python_imports
from cycles import Include
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
    assert not stale, f"no longer ask such a room: {sorted(stale)}"


def test_TestAwayFromItsRoom_IsFound():
    def include(file, header):
        return Edge(*(os.path.dirname(path) for path in (file, header)), True, f"{file} includes {header}")

    fine = [
        include("capi/test/x_test.c", "backend/comm/comm.h"),  # implemented by a host
        include("capi/test/x_test.c", "capi/test/rig/rig.h"),
        include("capi/test/rig/rig.c", "backend/moe/context/context.h"),  # no test
        include("backend/moe/test/x_test.c", "backend/moe/context/context.h"),
        include("capi/test/layer/schedule_test.c", "backend/cost/closed_forms.h"),
    ]
    assert layering.misplaced_tests(fine) == []
    away = [
        include("capi/test/x_test.c", "backend/moe/routing/binding.h"),
        include("capi/test/layer/schedule_test.c", "backend/tune/search/search.h"),
    ]
    assert layering.misplaced_tests([*fine, *away]) == [
        "capi/test/x_test.c includes backend/moe/routing/binding.h: a test of backend/moe belongs there",
        "capi/test/layer/schedule_test.c includes backend/tune/search/search.h: a test of backend/tune belongs there",
    ]


@pytest.mark.parametrize(
    "edge",
    [
        Edge("backend/base", "backend/device"),
        Edge("backend/comm", "backend/gemm"),
        Edge("backend/schedule", "backend/moe"),
        Edge("backend/schedule", "backend/comm/local"),
        Edge("backend/moe", "backend/comm/local"),
        Edge("backend/moe", "backend/gemm/onednn"),
        Edge("backend/memory", "backend/moe"),
        Edge("backend/moe", "backend/tune"),
        Edge("backend/moe", "backend/cost"),
        Edge("backend/cost", "backend/tune"),
        Edge("backend/tune", "backend/calibrate"),
        Edge("backend/pipeline", "backend/optim"),
        Edge("backend/pipeline", "backend/migration"),
        Edge("backend/comm/host", "backend/comm/local"),
        Edge("backend/gemm/auto", "backend/comm/local"),
        Edge("backend/moe", "backend/gemm/auto"),
        Edge("backend/comm/mpi", "backend/device/cuda"),
        Edge("backend/moe", "backend/cts"),
        Edge("backend/moe", "capi/src"),
        Edge("backend/moe", "capi/test"),
        Edge("backend/moe/test", "capi/src", is_test=True),
        Edge("backend/moe", "capi", why="//backend/moe uses //capi:libsluice.so.0"),
        Edge("backend/unknown", "backend/base"),
        Edge("adapters/torch", "backend/base"),
        Edge("examples/c", "capi/src"),
        Edge("integration_tests/mpi", "backend/comm"),
        Edge(
            "integration_tests/mpi",
            "capi/test/world",
            is_test=True,
            why="//integration_tests/mpi uses //capi/test/world",
        ),
        Edge("examples/c", "capi/test", why="//examples/c uses //capi/test/cuda:libfake_gpu.so"),
        Edge("capi", "backend/device/cuda", why="//capi:api uses //backend/device/cuda:fake"),
        Edge(
            "backend/gemm/cublas",
            "backend/gemm/cublas",
            why="//backend/gemm/cublas:cublas uses //backend/gemm/cublas:fake",
        ),
        Edge("backend/comm", "adapters/torch"),
        Edge("capi/src", "adapters/torch"),
    ],
    ids=lambda edge: f"{edge.source}-to-{edge.target}".replace("/", "_"),
)
def test_PlantedEdge_IsFound(edge):
    assert len(layering.violations([Edge("backend/comm", "backend/base"), edge])) == 1


def test_AllowedEdges_Pass():
    allowed = [
        Edge("backend/comm/local", "backend/base"),
        Edge("backend/comm/local", "backend/comm"),
        Edge("backend/comm/nccl", "backend/device/cuda"),
        Edge("backend/gemm/auto", "backend/gemm/onednn"),
        Edge("backend/moe", "backend/comm"),
        Edge("backend/moe", "backend/schedule"),
        Edge("backend/moe/test", "backend/comm/local"),
        Edge("backend/moe", "backend/gemm/ref", is_test=True),
        Edge("backend/moe/test", "capi/test", is_test=True),
        Edge("backend/pipeline/test", "backend/migration", is_test=True),
        Edge("backend/moe/test", "capi/test/cuda", is_test=True),
        Edge("backend/comm/local/test", "backend/cts/comm"),
        Edge("backend/base", "capi", why="//backend/base uses //capi:headers"),
        Edge("capi", "backend/comm/local"),
        Edge("capi/dry_step", "backend/comm/nccl", why="//capi/dry_step:dry_step uses //backend/comm/nccl:fake"),
        Edge("capi/test/cuda", "backend/comm/nccl", True, "//capi/test/cuda:fakes uses //backend/comm/nccl:fake"),
        Edge("capi/src", "backend/planner"),
        Edge("examples/c", "capi"),
        Edge("backend/base", "third_party/bazel"),
        Edge(
            "integration_tests/x",
            "capi/test",
            is_test=True,
            why="//integration_tests/x uses //capi/test/cuda:libfake_gpu.so",
        ),
    ]
    assert layering.violations(allowed) == []


def test_Rooms_SayWhatTheyAreAndWhomTheyUse(root):
    texts = build_comments.build_files(root)
    assert {"backend/base", "backend/comm/nccl", "backend/cts/comm"} <= set(texts)
    found = build_comments.violations(texts, layering.bazel_edges(root) + layering.include_edges(root))
    assert not found, "\n".join(found)


ROOM = "# A room.\n# May use: base,\n# comm/host.\n" + 'sluice_cc_library(\n    name = "x",\n)\n'


def test_RoomThatSaysTooLittle_IsFound():
    others = {"backend/base": ROOM, "backend/comm": ROOM, "backend/comm/host": ROOM}

    def said(text, *edges):
        return build_comments.violations({**others, "backend/x": text}, edges)

    allowed = [
        Edge("backend/x", "backend/base"),
        Edge("backend/x/kernels", "backend/comm/host/private"),
        Edge("backend/x", "backend/x/kernels"),
        Edge("backend/x", "capi"),
        Edge("backend/x", "backend/comm", is_test=True),
        Edge("backend/x/test", "backend/comm"),
    ]
    assert said(ROOM, *allowed) == []
    (unsaid,) = said(ROOM, Edge("backend/x/kernels", "backend/comm", why="x.c includes comm.h"))
    assert unsaid == "backend/x/BUILD does not say that it may use backend/comm (x.c includes comm.h)"
    assert len(said(ROOM.replace("base,\n# comm/host", "nothing of backend"), *allowed)) == 2
    assert (
        said(ROOM.replace("May use: base,\n# comm/host.", "Tests only: all."), Edge("backend/x", "backend/comm")) == []
    )
    (silent,) = said(ROOM.replace("May use", "Uses"))
    assert "begin with a comment" in silent
    (late,) = said("load()\n" + ROOM)
    assert "begin with a comment" in late


def test_Units_IncludeEachOtherInNoCycle(root):
    edges = cycles.includes(root)
    seen = {cycles.unit(edge.source) for edge in edges}
    assert {"backend/base/alloc", "capi/src/context", "adapters/torch/c10d_comm", "examples/c/rank"} <= seen
    found = cycles.violations(edges)
    assert not found, "\n".join(found)


# No cycle: c uses b, and b uses a. A file of the same stem, a second use, and missing files are no back edges.
NO_CYCLE = {
    "backend/a/a.h": "#include <stdio.h>\n",
    "backend/a/a.c": '#include "backend/a/a.h"\n#include "backend/a/a.inc.h"\n',
    "backend/a/a.inc.h": '#include "backend/elsewhere/c.h"\n',
    "backend/b/b.h": '#include "backend/a/a.h"\n',
    "backend/b/b.cu": '  #  include "backend/b/b.h"\n#include "backend/a/a.inc.h"\n#include "sluice/api.h"\n',
    "capi/include/sluice/api.h": "",
    "capi/src/c.cc": '#include "c.h"\n#include "backend/b/b.h"\n',
    "capi/src/c.h": '#include "sluice/api.h"\n',
}


def _plant(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return cycles.includes(str(folder))


def test_Includes_WithoutACycle_Pass(tmp_path):
    edges = _plant(tmp_path, NO_CYCLE)
    assert Include("capi/src/c.cc", "backend/b/b.h") in edges and Include("capi/src/c.cc", "capi/src/c.h") in edges
    assert Include("backend/b/b.cu", "capi/include/sluice/api.h") in edges
    assert cycles.violations(edges) == []


@pytest.mark.parametrize(
    "name, text, chain",
    [
        # A source alone makes the cycle: headers do not include each other, so the code compiles.
        (
            "backend/a/a.c",
            '#include "backend/b/b.h"',
            ["backend/a/a.c includes backend/b/b.h", "backend/b/b.cu includes backend/a/a.inc.h"],
        ),
        (
            "backend/a/a.inc.h",
            '#include "../../capi/src/c.h"',
            [
                "backend/a/a.inc.h includes capi/src/c.h",
                "capi/src/c.cc includes backend/b/b.h",
                "backend/b/b.cu includes backend/a/a.inc.h",
            ],
        ),
        (
            "capi/include/sluice/api.h",
            '#include "backend/b/b.h"',
            ["backend/b/b.cu includes capi/include/sluice/api.h", "capi/include/sluice/api.h includes backend/b/b.h"],
        ),
    ],
    ids=["two", "three", "by_the_public_headers"],
)
def test_PlantedCycle_IsFoundWithItsShortestChain(tmp_path, name, text, chain):
    (message,) = cycles.violations(_plant(tmp_path, {**NO_CYCLE, name: text}))
    head, *lines = message.split("\n")
    assert f"{len(chain)} units include each other in a cycle" in head
    assert sorted(line.strip() for line in lines) == sorted(chain)


def test_CyclesOfSeveralUnits_AreFoundSeparately():
    def ring(*names):
        return [Include(f"{a}.c", f"{b}.h") for a, b in zip(names, (*names[1:], names[0]))]

    edges = ring("x/a", "x/b") + ring("y/a", "y/b", "y/c", "y/d") + ring("y/b", "y/c")
    assert cycles.cycles(edges) == [("x/a", "x/b"), ("y/a", "y/b", "y/c", "y/d")]
    (two, four) = cycles.violations(edges)
    assert "2 units" in two and "x/a.c includes x/b.h" in two and "4 units" in four
    assert cycles.shortest_chain(edges, ("y/a", "y/b", "y/c", "y/d")) == ring("y/b", "y/c")


# ---- the Python package ----


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


MODULES = {
    "python_plugin/sluice/__init__.py": "from sluice import trace\n\ndef f():\n    from .settings import configure\n",
    "python_plugin/sluice/trace.py": "import torch\nfrom ._generated import TABLE\n",
    "python_plugin/sluice/settings.py": "import sluice.trace\n",
    "adapters/torch/__init__.py": "from .layer import Layer\n",
    "adapters/torch/layer.py": "from ... import trace\nfrom ...settings import configure\n",
    "adapters/deepspeed/hook.py": "from sluice.adapters.deepspeed.moe import layer\n",
    "adapters/deepspeed/moe/layer.py": "",
    "adapters/deepspeed/pipeline/stage.py": "",
    "adapters/deepspeed/test/test_x.py": "from sluice.adapters.megatron import hook\n",
    "adapters/megatron/hook.py": "",
}


def _planted(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return python_imports.imports(str(folder))


def test_Imports_OfEveryForm_AreSeen(tmp_path):
    edges = _planted(tmp_path, MODULES)
    package = "python_plugin/sluice"
    assert {(edge.source, edge.target) for edge in edges} == {
        (f"{package}/__init__.py", f"{package}/trace.py"),
        (f"{package}/__init__.py", f"{package}/settings.py"),
        (f"{package}/settings.py", f"{package}/trace.py"),
        ("adapters/torch/__init__.py", "adapters/torch/layer.py"),
        ("adapters/torch/layer.py", f"{package}/trace.py"),
        ("adapters/torch/layer.py", f"{package}/settings.py"),
        ("adapters/deepspeed/hook.py", "adapters/deepspeed/moe/layer.py"),
    }
    assert python_imports.violations(edges) == [] and cycles.violations(edges) == []


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("adapters/torch/layer.py", "def f():\n    import sluice\n", "torch may use base, planning, not front"),
        ("adapters/torch/layer.py", "from ..deepspeed import hook\n", "torch may use base, planning, not deepspeed"),
        (
            "adapters/deepspeed/hook.py",
            "from sluice.adapters.megatron.hook import x\n",
            "deepspeed/pipeline, not megatron",
        ),
        ("adapters/deepspeed/moe/layer.py", "from ..pipeline import stage\n", "moe may use base, planning"),
        ("adapters/deepspeed/pipeline/stage.py", "from .. import hook\n", "optimizer, not deepspeed"),
        ("python_plugin/sluice/trace.py", "def f():\n    from .adapters import torch\n", "base may use nothing else"),
    ],
    ids=["the_front", "a_host", "another_host", "another_folder", "the_folder_above", "an_adapter"],
)
def test_PlantedImport_IsFound(tmp_path, name, text, said):
    (message,) = python_imports.violations(_planted(tmp_path, {**MODULES, name: text}))
    assert message.startswith(f"{name}:{text.count(chr(10))} imports") and said in message


@pytest.mark.parametrize(
    "text",
    [
        "import sluice.settings\n",
        "def f():\n    from sluice.settings import x\n",
        "if TYPE_CHECKING:\n    from . import settings\n",
    ],
    ids=["at_once", "lazily", "for_types"],
)
def test_PlantedCircle_IsFound(tmp_path, text):
    edges = _planted(tmp_path, {**MODULES, "python_plugin/sluice/trace.py": text})
    (message,) = cycles.violations(edges, "modules import")
    assert message.startswith("2 modules import each other in a cycle")
    assert f"trace.py:{text.count(chr(10))} imports python_plugin/sluice/settings.py" in message
