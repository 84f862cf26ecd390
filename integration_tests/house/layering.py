# SPDX-License-Identifier: Apache-2.0
"""Checks the layering of the folders as a function over edges, so that tests can plant a wrong edge.

An edge means that one package uses another: by a Bazel dependency, or by an `#include` line (Bazel lets a source
include the headers of all its transitive dependencies).
"""

import os
import subprocess
import xml.etree.ElementTree
from typing import NamedTuple

import cycles

# A package may use strictly lower levels, and its own area.
LEVELS = {
    "base": 0,
    "model": 1,
    "group": 1,
    "device": 2,
    "comm": 2,
    "gemm": 2,
    "gate": 2,
    "schedule": 2,
    "memory": 3,
    "plan": 3,
    "cost": 4,
    "moe": 4,
    "calibrate": 5,
    "tune": 5,
    "planner": 6,
    "pipeline": 7,
    "optim": 7,
    "migration": 7,
    "swap": 7,
}
# Areas with implementations: the area's own package has the vtable, each subfolder an implementation.
VTABLES = ("device", "comm", "gemm")
# Implementations that may use another one, and why.
PAIRS = {
    ("backend/comm/nccl", "backend/device/cuda"),  # NCCL works on CUDA's streams
    ("backend/gemm/cublas", "backend/device/cuda"),
    ("backend/comm/nccl", "backend/device"),  # the handle of the device
    ("backend/gemm/cublas", "backend/device"),
    ("backend/cost", "backend/device/sim"),  # the predictor makes a simulated device, which no host can choose
    ("backend/comm/mpi_loader", "backend/comm/mpi"),  # the header that both sides of the plugin share
    ("backend/comm/mpi_loader", "backend/comm/host"),  # MPI is a table of callbacks to the host communicator
    ("backend/comm/host", "backend/comm/tcp"),  # messages of a communicator whose host does the exchanges
    ("backend/comm/nccl", "backend/comm/tcp"),  # the same with NCCL
}
# Folders of one level that a test of the first folder checks together.
TOGETHER = {("pipeline", "migration")}  # a layer's move during a batch, until its commit ends
# The implementation that chooses among its siblings, by name or by measurement, may use them.
SELECTOR = "auto"
# Tests of the C ABI that include a folder of the engine, or a higher one, but are not next to it.
ASKING = {
    ("capi/test/nth/nth_file_call_test.c", "calibrate"),  # it writes calibrate's files while calls of the C ABI fail
}
# The fakes of a GPU's libraries on the CPU, and their only user outside of tests, which records the engine's calls.
FAKES = ("//backend/device/cuda:fake", "//backend/device/cuda:emulated_kernels", "//backend/gemm/cublas:fake")
FAKES += ("//backend/comm/nccl:fake",)
USERS_OF_FAKES = ("//capi/dry_step:dry_step", *FAKES)
OUTSIDE = ("adapters", "python_plugin", "integration_tests", "examples")


class Edge(NamedTuple):
    source: str  # package, such as backend/comm/local
    target: str
    is_test: bool = False  # the user is a test or testonly
    why: str = ""  # the place, for the message


def is_test_package(package):
    if package.endswith("/fake") and package.count("/") == 3:
        return True  # backend/device/cuda/fake replaces an external library
    return package.endswith(("/test", "/bench")) or package.startswith("backend/cts")


def _area(package):
    """Returns ("comm", "local") for backend/comm/local/test, ("moe", "") for backend/moe."""
    parts = [part for part in package.split("/")[1:] if part != "test"]
    return parts[0] if parts else "", parts[1] if len(parts) > 1 else ""


def reason(edge):
    """Returns why the edge is forbidden, or None."""
    source, target = edge.source, edge.target
    user, _, used = edge.why.partition(" uses ")
    if used in FAKES and user not in USERS_OF_FAKES and not edge.is_test:
        return "fakes are for tests and for capi/dry_step"
    if source == target or target.split("/")[0] in ("third_party", ""):
        return None
    top = source.split("/")[0]
    if top in OUTSIDE:
        if target.startswith("backend") or target.startswith("capi/"):
            return f"{top} may use //capi only"
        return None
    if target == "capi":
        # All packages may use the public headers; the library above them is for code outside of backend.
        return (
            None
            if "headers" in edge.why or edge.is_test or not source.startswith("backend")
            else "backend may use //capi:headers only"
        )
    if target.split("/")[0] in OUTSIDE:
        return "the library may not use what stands around it"
    if top == "capi":
        return None  # capi/src is above the whole backend
    if target.startswith("capi"):
        # A test in a folder may run a whole layer: the library and the rigs of capi/test.
        of_tests = target.startswith("capi/test") and (edge.is_test or is_test_package(source))
        return None if of_tests else "backend may not use capi/src"
    if top != "backend" or not target.startswith("backend"):
        return None

    is_test = edge.is_test or is_test_package(source)
    if is_test_package(target) and not is_test:
        return "tests are for tests only"
    if source.startswith("backend/cts") or target.startswith("backend/cts"):
        return None if is_test else "conformance suites are for tests only"
    area, implementation = _area(source)
    target_area, target_implementation = _area(target)
    if area not in LEVELS or target_area not in LEVELS:
        return (
            f"backend/{area if area not in LEVELS else target_area} has no level in integration_tests/house/layering.py"
        )
    if area != target_area and LEVELS[target_area] >= LEVELS[area] and (source, target) not in PAIRS:
        if not (is_test and (target_area in VTABLES or (area, target_area) in TOGETHER)):
            return f"{area} may not use {target_area}: it does not stand below it"
    if target_area in VTABLES and target_implementation and not is_test:
        if area == target_area and implementation == SELECTOR:
            return None
        if (area, implementation) != (target_area, target_implementation) and (source, target) not in PAIRS:
            return f"implementations of {target_area} are met through backend/{target_area}/{target_area}.h only"
    return None


def violations(edges):
    found = []
    for edge in sorted(set(edges)):
        why = reason(edge)
        if why:
            found.append(f"{edge.source} -> {edge.target}: {why} ({edge.why})")
    return found


def misplaced_tests(edges):
    """Returns tests below capi/test that belong in a folder of the engine, as they include it."""
    found = []
    for edge in sorted(set(edges)):
        file, _, header = edge.why.partition(" includes ")
        area = _area(edge.target)[0] if edge.target.startswith("backend/") else ""
        is_of_abi = file.endswith("_test.c") and edge.source.startswith("capi/test")
        asks = LEVELS.get(area, 0) >= LEVELS["moe"]
        if is_of_abi and asks and (file, area) not in ASKING:
            found.append(f"{file} includes {header}: a test of backend/{area} belongs there")
    return found


def _package(label):
    return label[2:].split(":")[0] if label.startswith("//") else ""


def bazel_edges(root):
    """Returns the edges of the build graph."""
    command = ["bazel", "query", "--noshow_progress", "--noimplicit_deps", "--output=xml", "kind(rule, //...)"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError("bazel query failed:\n" + done.stderr[-3000:])
    edges = []
    # Bazel declares XML 1.1, which Python's parser refuses; the document is valid XML 1.0.
    document = xml.etree.ElementTree.fromstring(done.stdout.replace('version="1.1"', 'version="1.0"', 1))
    for rule in document.iter("rule"):
        testonly = rule.find("boolean[@name='testonly']")
        is_test = rule.get("class").endswith("_test") or (testonly is not None and testonly.get("value") == "true")
        for used in rule.iter("rule-input"):
            label = used.get("name")
            if label.startswith("//"):
                why = f"{rule.get('name')} uses {label}"
                edges.append(Edge(_package(rule.get("name")), _package(label), is_test, why))
    return edges


def include_edges(root):
    """Returns the edges of `#include` lines, except those of public headers."""
    edges = []
    for include in cycles.includes(root):
        package, name = os.path.split(include.source)
        if not include.target.startswith("capi/include/"):
            is_test = "_test." in name or "_fuzz." in name
            edges.append(Edge(package, os.path.dirname(include.target), is_test, str(include)))
    return edges
