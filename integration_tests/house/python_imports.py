# SPDX-License-Identifier: Apache-2.0
"""Finds imports among the modules of the Python package, including those inside functions and for type checkers.

Modules in a cycle of imports cannot be understood, tested or moved one at a time, no matter when the imports run. Areas
of the package have levels like the C folders. Imports by a computed name are not found.
"""

import ast
import os
from typing import NamedTuple

# The folders of the package's modules, and their names.
PLACES = {"python_plugin/sluice": "sluice", "adapters": "sluice.adapters"}
# Modules that users import, and those that report on everything: they may use the whole package, and no other module
# may use them.
FRONT = (
    "__init__",
    "__main__",
    "doctor*",
    "decision_export",
    "megatron",
    "optim",
    "expert_placement",
    "run",
    "self_check",
)
# The other areas that each area may use. A folder or a module of an adapter with its own line is an area, too.
MAY_USE = {
    "base": (),
    "timeline": ("base",),
    "planning": ("base", "timeline", "torch"),  # torch: `sluice tune` runs a layer
    "tracing": ("base", "timeline", "planning"),
    "torch": ("base", "planning"),  # planning: files of machines, plans of blocks
    "common": ("base", "torch"),
    "common/migration": ("base", "torch", "common"),
    "deepspeed/unsupported": ("base", "torch"),
    "deepspeed/optimizer": ("torch", "common", "common/migration", "deepspeed/unsupported"),
    "deepspeed/moe": (
        *("base", "planning", "torch", "common", "common/migration", "deepspeed/unsupported", "deepspeed/optimizer"),
    ),
    "deepspeed/pipeline": (
        *("base", "planning", "torch", "common", "common/migration"),
        *("deepspeed/unsupported", "deepspeed/optimizer"),
    ),
    "deepspeed": (
        *("base", "common", "common/migration"),
        *("deepspeed/unsupported", "deepspeed/optimizer", "deepspeed/moe", "deepspeed/pipeline"),
    ),
    "megatron": ("base", "planning", "torch", "common", "common/migration"),
    "transformers": ("base", "planning", "torch", "common", "common/migration"),
    "pipelining": ("base", "torch", "common"),
    "front": (
        # The command line loads the modules of its commands by name.
        *("base", "planning", "torch", "common/migration", "deepspeed", "deepspeed/moe", "megatron", "transformers"),
    ),
}


class Import(NamedTuple):
    source: str  # adapters/torch/layer.py
    target: str
    line: int = 0

    def __str__(self):
        return f"{self.source}:{self.line} imports {self.target}"


def modules(root):
    """Returns the file of each module, by its name. Tests are not in the package."""
    found = {}
    for place, package in PLACES.items():
        for folder, folders, names in os.walk(os.path.join(root, place)):
            folders[:] = sorted(set(folders) - {"test", "__pycache__"})
            for name in sorted(names):
                if name.endswith(".py"):
                    path = os.path.relpath(os.path.join(folder, name), root)
                    dotted = os.path.relpath(path, place)[: -len(".py")].replace(os.sep, ".")
                    found[f"{package}.{dotted}".removesuffix(".__init__")] = path
    return found


def imports(root):
    """Returns every import of a module of the package by another one."""
    known = modules(root)
    found = []
    for name, path in known.items():
        with open(os.path.join(root, path), encoding="utf-8") as file:
            tree = ast.parse(file.read())
        package = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        for node in ast.walk(tree):
            targets = {known[target] for target in _targets(node, package, known)}
            found += [Import(path, target, node.lineno) for target in sorted(targets - {path})]
    return found


def _targets(node, package, known):
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name in known]
    if not isinstance(node, ast.ImportFrom):
        return []
    above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
    return [name for name in names if name in known]


def area(path):
    """Returns the area of a file of the package."""
    for place in PLACES:
        if path.startswith(f"{place}/"):
            first, *rest = path[len(place) + 1 :].removesuffix(".py").split("/")
            if rest and first in MAY_USE:
                within = f"{first}/{rest[0]}"
                return within if within in MAY_USE else first
            is_front = any(first == one or (one.endswith("*") and first.startswith(one[:-1])) for one in FRONT)
            return "front" if is_front else "base"
    raise AssertionError(f"{path} is in no place of the package")


def violations(edges):
    """Returns a message for each forbidden import."""
    found = []
    for edge in sorted(set(edges)):
        source, target = area(edge.source), area(edge.target)
        if source != target and target not in MAY_USE[source]:
            found.append(f"{edge}: {source} may use {', '.join(MAY_USE[source]) or 'nothing else'}, not {target}")
    return found
