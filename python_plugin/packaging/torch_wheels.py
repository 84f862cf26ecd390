# SPDX-License-Identifier: Apache-2.0
"""Unpacks a torch wheel's headers and two libraries, for compiling the adapter. torch itself is never run.

The same steps therefore work for CPU builds and for CUDA builds, whose libraries need gigabytes of NVIDIA's to load.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile

import install
import sbom
from libraries import Failure, run

NEEDED = re.compile(r"torch/(include/.*|lib/lib(torch_cpu|c10)\.so|version\.py)|torch-[^/]*\.dist-info/METADATA")
LIBRARIES = ("libtorch_cpu.so", "libc10.so")
STAMP = "wheel.json"


def fetch(version: str, folder: str) -> str:
    """Returns the release's subfolder of `folder`; pip downloads its wheel (200 to 600 MB) the first time."""
    whole = os.path.join(folder, f"torch-{version}")
    if os.path.exists(whole):
        return whole
    os.makedirs(folder, exist_ok=True)
    install.say(f"downloading torch {version}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        command += ["--only-binary", ":all:", "--dest", scratch, f"torch=={version}"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            said = (done.stdout.strip().splitlines() or ["nothing"])[-1]
            raise Failure(f"pip has no torch {version} for this Python ({said}): name those to use with --torch")
        (wheel,) = glob.glob(os.path.join(scratch, "torch-*.whl"))
        part = os.path.join(scratch, "part")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(part, [name for name in archive.namelist() if NEEDED.fullmatch(name)])
        (about,) = glob.glob(os.path.join(part, "torch-*.dist-info", "METADATA"))
        with open(about, errors="replace") as text:
            found = {
                "name": os.path.basename(wheel),
                "sha256": sbom.sha256(wheel),
                "licence": re.search(r"^License(?:-Expression)?: (.*)$", text.read(), re.MULTILINE).group(1),
            }
        with open(os.path.join(part, STAMP), "w") as file:
            json.dump({**found, **_version(part)}, file)
        shutil.move(part, whole)
    return whole


def about(folder: str) -> dict[str, str]:
    """Returns name, sha256 and licence of the wheel, and version, git_version and cuda from its version.py."""
    with open(os.path.join(folder, STAMP)) as file:
        return json.load(file)


def _version(folder: str) -> dict[str, str]:
    values: dict[str, str] = {}
    with open(os.path.join(folder, "torch", "version.py")) as file:
        exec(file.read(), values)
    return {"version": values["__version__"], "git_version": values["git_version"], "cuda": values["cuda"]}


def _symbols(path: str, *options: str) -> set[str]:
    lines = run("nm", "-D", "--format=just-symbols", *options, path).split()
    return {name.partition("@")[0] for name in lines}


def cxx11_abi(folder: str) -> int:
    """Returns the build's _GLIBCXX_USE_CXX11_ABI, by whether its symbols contain strings of that ABI."""
    names = _symbols(os.path.join(folder, "torch", "lib", "libc10.so"), "--defined-only")
    return int(any("NSt7__cxx1112basic_string" in name for name in names))


def missing(adapter: str, folder: str) -> list[str]:
    """Returns the torch symbols that the adapter needs and this build lacks."""
    lib = os.path.join(folder, "torch", "lib")
    has = set().union(*(_symbols(os.path.join(lib, name), "--defined-only") for name in LIBRARIES))
    asked = {name for name in _symbols(adapter, "--undefined-only") if re.search(r"\d(c10|at|torch|c10d)[0-9NE]", name)}
    if not asked:
        raise Failure(f"{adapter} asks for no symbol of torch: it was not linked as expected")
    return sorted(asked - has)
