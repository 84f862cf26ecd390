# SPDX-License-Identifier: Apache-2.0
"""What a shared library says about itself: names, and the versions of the C and C++ libraries that it needs.

And what the script of its linker says about its symbols.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from libraries import run

# The newest C library that what is shipped may need: Debian 12, Ubuntu 22.04 and RHEL 9 have it.
GLIBC_CAPACITY = (2, 34)
NEED = re.compile(r"Name: (GLIBC|GLIBCXX|CXXABI)_([0-9.]+)")


def needs(path: str, family: str = "GLIBC") -> tuple[int, ...]:
    """The newest version of that family of symbols that the library asks its loader for; () for none."""
    found = NEED.findall(run("readelf", "-W", "--version-info", path))
    return max((tuple(map(int, number.split("."))) for name, number in found if name == family), default=())


def glibc(paths: Iterable[str]) -> tuple[int, ...]:
    """The oldest C library that runs all of them."""
    return max(needs(path)[:2] for path in paths)


def dynamic(path: str, tag: str) -> list[str]:
    """The values of one tag of the dynamic section, such as NEEDED or SONAME."""
    return re.findall(rf"\({tag}\).*\[(.*)\]", run("readelf", "-W", "--dynamic", path))


def sections(path: str) -> set[str]:
    return set(re.findall(r"^\s*\[ *\d+\] (\.\S+)", run("readelf", "-W", "--sections", path), re.MULTILINE))


def build_id(path: str) -> str:
    return re.search(r"Build ID: ([0-9a-f]+)", run("readelf", "-W", "--notes", path)).group(1)


def map_symbols(text: str) -> dict[str, str]:
    """{symbol: version} of a linker's version script."""
    text = re.sub(r"/\*.*?\*/|#[^\n]*", "", text, flags=re.DOTALL)
    symbols = {}
    for version, body in re.findall(r"(\w[\w.]*)\s*\{(.*?)\}", text, re.DOTALL):
        found = re.search(r"global:(.*?)(?:local:|$)", body, re.DOTALL)
        for name in (found.group(1) if found else "").replace(";", " ").split():
            if "*" in name or name in symbols:
                raise ValueError(
                    f"{name} stands in the version script twice, or is a wildcard: name each function once"
                )
            symbols[name] = version
    return symbols
