"""Who may use whom, asked of the build graph and of the `#include` lines."""

import layering
import pytest
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
        Edge("backend/stage", "backend/optim"),
        Edge("backend/comm/host", "backend/comm/local"),
        Edge("backend/gemm/auto", "backend/comm/local"),
        Edge("backend/moe", "backend/gemm/auto"),
        Edge("backend/comm/mpi", "backend/device/cuda"),
        Edge("backend/moe", "backend/cts"),
        Edge("backend/moe", "capi/src"),
        Edge("backend/moe", "capi", why="//backend/moe uses //capi:libsluice.so.0"),
        Edge("backend/unknown", "backend/base"),
        Edge("adapters/torch", "backend/base"),
        Edge("examples/c", "capi/src"),
        Edge("integration_tests/mpi", "backend/comm"),
        Edge("integration_tests/mpi", "capi/test", is_test=True, why="//integration_tests/mpi uses //capi/test:world"),
        Edge("examples/c", "capi/test", why="//examples/c uses //capi/test:libfake_gpu.so"),
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
        Edge("backend/comm/local/test", "backend/cts/comm"),
        Edge("backend/base", "capi", why="//backend/base uses //capi:headers"),
        Edge("capi", "backend/comm/local"),
        Edge("capi/src", "backend/planner"),
        Edge("examples/c", "capi"),
        Edge("backend/base", "third_party/bazel"),
        Edge(
            "integration_tests/x",
            "capi/test",
            is_test=True,
            why="//integration_tests/x uses //capi/test:libfake_gpu.so",
        ),
    ]
    assert layering.violations(allowed) == []
