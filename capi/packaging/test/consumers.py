# SPDX-License-Identifier: Apache-2.0
"""Builds a project in C and C++ against an installed tree, without using this checkout, and runs it."""

import os
import re
import shutil
import subprocess

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(HERE)))
# The output of the program at the top of sluice.h.
STEP = "y 1 0  dx 1 0\ny 1 2  dx 2 3\ny 0.5 0.5  dx 0.5 0.5\n"
LOSSES = 5  # lines of the C++ program


def run(*command, **options):
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", **options.pop("env", {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, **options)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}", pytrace=False)
    return done.stdout


def project(folder):
    """Writes the project: the program at the top of sluice.h, the example in C++ and a CMakeLists.txt."""
    shutil.copytree(os.path.join(HERE, "consumer"), folder)
    shutil.copy(os.path.join(ROOT, "examples", "cpp", "local.cc"), folder)
    with open(os.path.join(ROOT, "capi", "include", "sluice", "sluice.h")) as file:
        program = re.search(r"^ \*   (#include(?:.*\n)+? \*   \})\n \*\n", file.read(), re.M).group(1)
    (folder / "step.c").write_text(program.replace("\n *   ", "\n") + "\n")
    return folder


def check(folder, libdir, **env):
    """Checks that both programs run with the library in `libdir`."""
    for name, said, times in (("step", STEP, 1), ("local", " loss ", LOSSES)):
        assert run(folder / name, env=env).count(said) == times
        loaded = re.search(r"libsluice\.so\.0 => (\S+)", run("ldd", folder / name, env=env)).group(1)
        assert os.path.realpath(os.path.dirname(loaded)) == os.path.realpath(libdir)


def with_pkg_config(folder, libdir, **env):
    """Builds and runs the programs as a Makefile would. `env` has pkg-config's variables that name the tree."""
    flags = run("pkg-config", "--cflags", "--libs", "sluice >= 0.1", env=env).split()
    strict = ["-O1", "-Wall", "-Wextra", "-Werror", "-pedantic"]
    run("gcc", "-std=c99", *strict, "step.c", *flags, "-o", "step", cwd=folder)
    run("g++", "-std=c++11", *strict, "-pthread", "local.cc", *flags, "-o", "local", cwd=folder)
    check(folder, libdir, LD_LIBRARY_PATH=str(libdir))


def with_cmake(folder, libdir, prefix):
    """Builds and runs the programs with CMake, which writes the library's folder into their RUNPATH."""
    run("cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", "-DWANTED=0.1", cwd=folder)
    run("cmake", "--build", "build", cwd=folder)
    check(folder / "build", libdir)
