# SPDX-License-Identifier: Apache-2.0
"""Tests the builder of the shared object with a compiler that only records its calls."""

import os
import pathlib
import stat
import subprocess
import sys
import zipfile

import pytest
from sluice.adapters.torch import build
from sluice.adapters.torch.build import SOURCES

OTHER_TORCH = "2.11.0"  # of the GPU machines on which integration_tests/gpu will run first
VENDOR = pathlib.Path(__file__).resolve().parents[3] / ".venv-vendor"
ONCE = len(SOURCES) + 1  # calls of the compiler: each source, and the link
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo stub {version}; exit 0; fi
echo "$@" >> {log}
sleep {pause}
{extra}
while [ "$1" != "-o" ]; do shift; done
echo made > "$2"
"""


def compiler(folder, extra="", version="1", pause=0.3):
    path = folder / "cxx"
    path.write_text(COMPILER.format(log=folder / "log", extra=extra, version=version, pause=pause))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def calls(folder):
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "sluice.adapters.torch.build", *arguments],
        env=dict(os.environ, **environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    text = process.communicate(timeout=280)[0]
    return process.returncode, text


@pytest.mark.parametrize("module", ["sluice", "sluice.run", "sluice.adapters.torch.build"])
def test_Modules_RunByName_WarnOfNothing(module):
    """runpy warns if the package has imported the module already."""
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", module, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0 and done.stderr == "", done


def test_Build_Interrupted_GoesOnWithWhatWasFinished(tmp_path):
    """The last source fails at first. Then only this source is compiled, and no kept objects remain."""
    out, last = tmp_path / "out", SOURCES[-1]
    refuse = f'case "$*" in *{last}*) echo "error: such a pity"; exit 1;; esac'
    code, text = finish(start("--out", str(out), CXX=compiler(tmp_path, refuse)))
    assert code == 1 and calls(tmp_path) == len(SOURCES) and "such a pity" in text and "Traceback" not in text
    assert [name for name in os.listdir(out) if not name.startswith(".")] == []
    code, text = finish(start("--out", str(out), CXX=compiler(tmp_path)))
    assert code == 0 and calls(tmp_path) == len(SOURCES) + 2, text
    assert text.count("compiling") == 1 and last in text
    (made,) = out.glob("_torch_*.so")
    assert sorted(os.listdir(out)) == [".build.lock", made.name, f"{made.name}.stamp"]
    assert finish(start("--out", str(out), CXX=compiler(tmp_path)))[0] == 0 and calls(tmp_path) == len(SOURCES) + 2
    assert finish(start("--out", str(out), "--force", CXX=compiler(tmp_path)))[0] == 0
    assert calls(tmp_path) == len(SOURCES) + 2 + ONCE


def test_Build_FileSystemWithoutLocks_CompilesAndSaysSo(tmp_path):
    """On some network file systems two concurrent builds may both compile; the result is valid."""
    source, library, out = tmp_path / "flock.c", tmp_path / "libflock.so", tmp_path / "out"
    source.write_text("#include <errno.h>\nint flock(int fd, int how) { errno = ENOLCK; return -1; }\n")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    started = [start("--out", str(out), CXX=compiler(tmp_path), LD_PRELOAD=str(library)) for _ in range(2)]
    results = [finish(process) for process in started]
    assert all("cannot be locked (No locks available)" in text for _, text in results), results
    assert all(code == 0 for code, _ in results), results
    again = finish(start("--out", str(out), CXX=compiler(tmp_path), LD_PRELOAD=str(library)))
    assert again[0] == 0 and "is ready" not in again[1] and calls(tmp_path) <= 2 * ONCE


def headers_of(torch_version):
    """Returns the headers from that release's wheel. 530 MB are downloaded the first time. 62 MB stay, where
    `./test --vendor` keeps its downloads.
    """
    folder = VENDOR / f"torch-{torch_version}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", part, f"torch=={torch_version}"]
        subprocess.run(pip, check=True)
        (wheel,) = part.glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [name for name in archive.namelist() if name.startswith("torch/include/")])
        wheel.unlink()
        part.rename(folder)
    return folder / "torch" / "include"


@pytest.mark.full
@pytest.mark.timeout(3000)
def test_Sources_WithTheTorchOfAGpuMachine_Compile():
    """Two ranks on CUDA compile the adapter there, against another torch than the one that is installed here."""
    include = headers_of(OTHER_TORCH)
    folders = [*("-I", build.include_dir()), *("-isystem", include), *("-isystem", include / "torch/csrc/api/include")]
    flags = [flag for flag in build.FLAGS if "prefix-map" not in flag]
    for name in SOURCES:
        command = ["g++", *flags, *folders, "-fsyntax-only", os.path.join(build.HERE, name)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-3000:]
