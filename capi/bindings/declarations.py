# SPDX-License-Identifier: Apache-2.0
"""Extracts the declarations of the public C headers as text for a parser of plain C: no macros or attributes.

The preprocessor runs with empty system headers (the parser's prelude defines `int32_t` and `size_t`), attributes are
defined as empty, and integer macros are listed as `#define`s.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile

SYSTEM_HEADERS = ("assert.h", "limits.h", "stdbool.h", "stddef.h", "stdint.h")
INTEGER_MACRO = re.compile(r"^#define (SLUICE_\w+) \(?(-?(?:0[xX][0-9a-fA-F]+|\d+))[uUlL]*\)?$")


def header_files(include_dir: str) -> list[str]:
    folder = os.path.join(include_dir, "sluice")
    return sorted("sluice/" + name for name in os.listdir(folder) if name.endswith(".h"))


def _preprocess(include_dir: str, source: str, *options: str) -> str:
    with tempfile.TemporaryDirectory() as empty:
        for name in SYSTEM_HEADERS:
            open(os.path.join(empty, name), "w").close()
        command = ["gcc", "-std=c99", "-nostdinc", "-E", "-P", *options]
        command += ["-D__attribute__(x)=", "-I", empty, "-I", include_dir, "-x", "c", "-"]
        done = subprocess.run(command, input=source, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError("the public headers do not preprocess:\n" + done.stderr)
    return done.stdout


def experimental(include_dir: str) -> set[str]:
    """Returns the functions that the headers mark with SLUICE_EXPERIMENTAL."""
    found: set[str] = set()
    for name in header_files(include_dir):
        with open(os.path.join(include_dir, name)) as file:
            found |= set(re.findall(r"^SLUICE_\w+ SLUICE_EXPERIMENTAL\b[^;(]*?\b(sluice_\w+)\(", file.read(), re.M))
    return found


def read(include_dir: str) -> tuple[dict[str, int], str]:
    """Returns integer macros by name, and the declarations of all public headers."""
    source = "".join(f'#include "{name}"\n' for name in header_files(include_dir))
    macros = {}
    for line in _preprocess(include_dir, source, "-dM").splitlines():
        found = INTEGER_MACRO.match(line)
        if found:
            macros[found.group(1)] = int(found.group(2), 0)
    return dict(sorted(macros.items())), _preprocess(include_dir, source)
