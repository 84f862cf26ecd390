# SPDX-License-Identifier: Apache-2.0
"""Tests the detection of the machine's tools by Bazel and set-up, while one Bazel server runs and tools are installed
and removed."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RULES = ("backend/comm/mpi/mpi_repository.bzl", "backend/device/cuda/cuda_repository.bzl")
TOOLS = "basename bash cat cut dirname env find grep head java javac ls readlink sh sort stat tail uname".split()
SERVER = ("--host_jvm_args=-Xmx256m", "--max_idle_secs=60")
BUILD = """load("@cuda//:nvcc.bzl", "NVCC", "NVRTC")
filegroup(name = "found", srcs = ["@mpi//:mpi"], tags = [NVRTC or NVCC])
"""


class Machine:
    """Makes a checkout with only the real detection rules, and a PATH with only the added programs."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.include = folder / "checkout", folder / "bin", folder / "openmpi" / "include"
        self._out = folder / "out"
        shutil.copytree(ROOT / "third_party" / "bazel", self.checkout / "third_party" / "bazel")
        for path in ("WORKSPACE", "tools/bazel", *RULES):
            (self.checkout / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, self.checkout / path)
        for path in RULES:
            (self.checkout / path).with_name("BUILD").touch()
        (self.checkout / "BUILD").write_text(BUILD)
        self.bin.mkdir()
        for tool in ("bazel", *TOOLS):
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)

    def bazel(self, *arguments: str) -> str:
        command = [self.bin / "bazel", f"--output_user_root={self._out}", *SERVER, *arguments]
        environment = {"PATH": str(self.bin), "HOME": str(self._out)}
        done = subprocess.run(command, cwd=self.checkout, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def program(self, name: str, body: str) -> Path:
        path = self.bin / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return path

    def found(self) -> tuple[bool, str]:
        """Returns whether a build now finds an Open MPI, and which compiler of kernels."""
        text = self.bazel("query", "--noshow_progress", "--output=build", "//:found + @mpi//:mpi")
        tags = re.search(r"^  tags = \[\"?(.*?)\"?\],$", text, re.MULTILINE)
        return "SLUICE_NO_MPI" not in text, tags[1] if tags else ""

    def looked(self) -> list[tuple[int, int]]:
        """Returns a value that changes when a rule has run again."""
        files = [next(self._out.glob(f"*/external/{name}/BUILD")) for name in ("mpi", "cuda")]
        return [(file.stat().st_ino, file.stat().st_mtime_ns) for file in files]

    def hash_of_install(self) -> str:
        """Returns the hash by which install.py detects whether the installed library is current."""
        script = "import sys; sys.path.insert(0, sys.argv[1]); import install; print(install.input_hash())"
        command = [sys.executable, "-c", script, ROOT / "python_plugin" / "packaging"]
        environment = {"PATH": str(self.bin)}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    made = Machine(tmp_path)
    try:
        yield made
    finally:
        made.bazel("shutdown")


def test_Found_InstalledAndRemovedUnderOneServer_IsWhatIsThereNow(machine: Machine) -> None:
    files = sorted(machine.checkout.rglob("*"))
    has_mpi, at_first = machine.found()
    server, hash_at_first = machine.bazel("info", "server_pid"), machine.hash_of_install()
    assert not has_mpi
    looked = machine.looked()
    assert (
        machine.found() == (False, at_first) and machine.looked() == looked
    )  # nothing changed, so nothing is detected again

    mpicc = machine.program("mpicc", f'[ "$1" != --showme:incdirs ] || echo "{machine.include}"')
    assert machine.found() == (False, at_first)  # only the wrapper is installed; its headers are in another package
    machine.include.mkdir(parents=True)
    (machine.include / "mpi.h").touch()
    nvcc = machine.program("nvcc", "")
    assert machine.found() == (True, str(nvcc))
    assert machine.hash_of_install() != hash_at_first
    looked = machine.looked()
    assert machine.found() == (True, str(nvcc)) and machine.looked() == looked

    pinned = machine.checkout / ".venv/lib/python3/site-packages/nvidia"
    (pinned / "nvfatbin/lib").mkdir(parents=True)
    (pinned / "nvfatbin/lib/libnvfatbin.so.12").touch()
    assert machine.found() == (True, str(pinned))  # preferred over the machine's own
    shutil.rmtree(machine.checkout / ".venv")
    mpicc.unlink()
    nvcc.unlink()
    assert machine.found() == (False, at_first)
    assert machine.hash_of_install() == hash_at_first
    assert machine.bazel("info", "server_pid") == server
    assert sorted(machine.checkout.rglob("*")) == files  # the checkout is not written either
