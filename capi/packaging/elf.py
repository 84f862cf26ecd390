# SPDX-License-Identifier: Apache-2.0
"""Reads shared libraries: names, sections, symbols, and the versions of the C and C++ libraries that they need."""

from __future__ import annotations

import re
from collections.abc import Iterable

from libraries import run

# The newest glibc that shipped libraries may need: Debian 12, Ubuntu 22.04 and RHEL 9 have it.
GLIBC_CAPACITY = (2, 34)
NEED = re.compile(r"Name: (GLIBC|GLIBCXX|CXXABI)_([0-9.]+)")


def needs(path: str, family: str = "GLIBC") -> tuple[int, ...]:
    """Returns the newest symbol version of that family that the library needs; () if it needs none."""
    found = NEED.findall(run("readelf", "-W", "--version-info", path))
    return max((tuple(map(int, number.split("."))) for name, number in found if name == family), default=())


def glibc(paths: Iterable[str]) -> tuple[int, ...]:
    """Returns the oldest version of glibc with which all the libraries can be loaded."""
    return max(needs(path)[:2] for path in paths)


def dynamic(path: str, tag: str) -> list[str]:
    """Returns the values of one tag of the dynamic section, such as NEEDED or SONAME."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-W", "--dynamic", path))


def sections(path: str) -> set[str]:
    return set(re.findall(r"^\s*\[ *\d+\] (\.\S+)", run("readelf", "-W", "--sections", path), re.MULTILINE))


def build_id(path: str) -> str:
    return re.search(r"Build ID: ([0-9a-f]+)", run("readelf", "-W", "--notes", path)).group(1)


def exported(path: str) -> dict[str, str]:
    """Returns {exported symbol: its version}, without those that have no version."""
    return dict(re.findall(r" (\w+)@@(\S+)$", run("readelf", "-W", "--dyn-syms", path), re.MULTILINE))
