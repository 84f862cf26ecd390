# SPDX-License-Identifier: Apache-2.0
"""Lays out the files that users of the C ABI install below a prefix, to run, build and debug programs."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile

import libraries
from libraries import INCLUDE, ROOT

sys.path.insert(0, os.path.join(ROOT, "capi", "bindings"))
import generate

TEMPLATES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "templates")
EXAMPLES = os.path.join(ROOT, "examples", "c")
SONAME = "libsluice.so.0"


def write(path: str, text: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write(text)


def filled(template: str, values: dict[str, str]) -> str:
    """Returns the text of a template with its @NAMES@ replaced."""
    with open(os.path.join(TEMPLATES, template)) as file:
        return re.sub(r"@([A-Z0-9]+)@", lambda found: values[found.group(1)], file.read())


def copy(source: str, path: str) -> None:
    """Copies a file and its mode."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    shutil.copy(source, path)


def runtime(prefix: str, libdir: str, built: list[str], version: str, debug: str) -> None:
    """Installs the stripped libraries and the SONAME's link. Debug files go to the folder `debug`."""
    os.makedirs(debug, exist_ok=True)
    for path in built:
        name = os.path.basename(path)
        name = f"libsluice.so.{version}" if name == SONAME else name
        libraries.strip(path, os.path.join(prefix, libdir, name), os.path.join(debug, f"{name}.debug"))
    os.symlink(f"libsluice.so.{version}", os.path.join(prefix, libdir, SONAME))


def development(prefix: str, libdir: str, version: str, pkg_config_prefix: str) -> None:
    """Installs headers, bindings and examples, the link for `-lsluice`, and the files for pkg-config and CMake."""
    for name in sorted(os.listdir(os.path.join(INCLUDE, "sluice"))):
        copy(os.path.join(INCLUDE, "sluice", name), os.path.join(prefix, "include/sluice", name))
    with tempfile.TemporaryDirectory() as made:
        for path in generate.write(made):
            to = "include/sluice/sluice.hpp" if path.startswith("cpp/") else f"share/sluice/bindings/{path}"
            copy(os.path.join(made, path), os.path.join(prefix, to))
    for name in sorted(os.listdir(EXAMPLES)):
        copy(os.path.join(EXAMPLES, name), os.path.join(prefix, "share/sluice/examples/c", name))
    os.makedirs(os.path.join(prefix, libdir), exist_ok=True)
    os.symlink(SONAME, os.path.join(prefix, libdir, "libsluice.so"))
    major, minor, _ = version.split(".")
    values = {"PREFIX": pkg_config_prefix, "LIBDIR": libdir, "VERSION": version, "MAJOR": major, "MINOR": minor}
    for name, folder in (
        ("sluice.pc", "pkgconfig"),
        ("sluice-config.cmake", "cmake/sluice"),
        ("sluice-config-version.cmake", "cmake/sluice"),
    ):
        write(os.path.join(prefix, libdir, folder, name), filled(f"{name}.in", values))
