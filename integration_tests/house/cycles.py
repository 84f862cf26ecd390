# SPDX-License-Identifier: Apache-2.0
"""Finds cycles between units, by includes and by imports.

A unit is the files of one stem in one folder (`plan.c`, `plan.h`, `plan.inc.h`), or a module of Python. A unit uses
the units whose files it includes or imports. Units in a cycle cannot be understood, built or moved one at a time.
"""

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


def cycles(edges):
    """Returns the units of each cycle (strongly connected component of several units) as a sorted tuple."""
    uses = defaultdict(set)
    used_by = defaultdict(set)
    for edge in edges:
        uses[unit(edge.source)].add(unit(edge.target))
        used_by[unit(edge.target)].add(unit(edge.source))
    found, done = [], set()
    for start in sorted(uses):
        if start not in done:
            together = _reached(start, uses) & _reached(start, used_by)
            done |= together
            if len(together) > 1:
                found.append(tuple(sorted(together)))
    return found


def _reached(start, neighbours):
    reached, waiting = {start}, [start]
    while waiting:
        for unit_ in neighbours.get(waiting.pop(), ()):
            if unit_ not in reached:
                reached.add(unit_)
                waiting.append(unit_)
    return reached


def violations(edges, what="units include"):
    """Returns a message for each cycle, with a use of each unit by another one."""
    found = []
    for units in cycles(edges):
        inside = {}
        for edge in sorted(edges):
            pair = unit(edge.source), unit(edge.target)
            if pair[0] != pair[1] and set(pair) <= set(units):
                inside.setdefault(pair, f"    {edge}")
        chain = "\n".join(inside.values())
        found.append(f"{len(units)} {what} each other in a cycle: {', '.join(units)}:\n{chain}")
    return found
