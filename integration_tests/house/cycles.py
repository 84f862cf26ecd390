# SPDX-License-Identifier: Apache-2.0
"""Reads the includes of the tree's C files, and finds a cycle between units, by includes and by imports.

A unit is the files of one stem in one folder (`plan.c`, `plan.h`, `plan.inc.h`), or a module of Python. A unit uses
the units whose files it includes or imports. Units in a cycle cannot be understood, built or moved one at a time.
"""

import graphlib
import os
import re
from collections import defaultdict
from typing import NamedTuple

TOPS = ("backend", "capi", "adapters", "python_plugin", "integration_tests", "examples")
# The folders that are searched for a quoted include, after the folder of the file.
INCLUDE_PATHS = ("", "capi/include")
SOURCE = re.compile(r"\.(c|cc|cpp|cu|h|inc)$")
QUOTED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class Include(NamedTuple):
    source: str  # backend/tune/tuner.c
    target: str

    def __str__(self):
        return f"{self.source} includes {self.target}"


def unit(path):
    folder, name = os.path.split(path)
    return os.path.join(folder, name.split(".")[0])


def includes(root):
    """Returns every quoted include of a file of the tree by another one."""
    found = []
    for top in TOPS:
        for folder, folders, names in os.walk(os.path.join(root, top)):
            folders.sort()
            for name in sorted(filter(SOURCE.search, names)):
                source = os.path.relpath(os.path.join(folder, name), root)
                with open(os.path.join(root, source), errors="replace") as file:
                    text = file.read()
                for path in QUOTED.findall(text):
                    found += [Include(source, target) for target in _resolve(root, source, path)]
    return found


def _resolve(root, source, path):
    """Returns [the included file], or [] if it is not in the tree."""
    for folder in (os.path.dirname(source), *INCLUDE_PATHS):
        target = os.path.normpath(os.path.join(folder, path))
        if os.path.isfile(os.path.join(root, target)):
            return [target]
    return []


def violations(edges, what="units include"):
    """Returns [a message on one cycle, with a use of each unit by another one], or [] if there is no cycle."""
    uses, first = defaultdict(set), {}
    for edge in sorted(edges):
        user, used = unit(edge.source), unit(edge.target)
        if user != used:
            uses[user].add(used)
            first.setdefault((user, used), f"    {edge}")
    try:
        graphlib.TopologicalSorter(uses).prepare()
    except graphlib.CycleError as error:
        circle = error.args[1]  # each unit is used by the next one, and the last is the first again
        units = sorted(set(circle))
        chain = "\n".join(first[pair] for pair in zip(circle[1:], circle))
        return [f"{len(units)} {what} each other in a cycle: {', '.join(units)}:\n{chain}"]
    return []
