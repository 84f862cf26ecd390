# SPDX-License-Identifier: Apache-2.0
"""Compares the BUILD comment of a folder (a package of backend with a library) with the build graph.

The comment describes the folder, then lists `May use: base, comm/host.`, folders of backend (`nothing of backend`),
or `Tests only: ...`.
"""

import os
import re

import layering

COMMENT = re.compile(r"\A(?:#.*\n)+")
MAY_USE = re.compile(r"May use: ([^.]+)\.")
LIBRARY = re.compile(r"^ *(sluice_)?cc_(library|folder)\(", re.MULTILINE)


def build_files(root):
    """Returns {package: text} of the BUILD files."""
    found = {}
    for folder, _, names in os.walk(os.path.join(root, "backend")):
        if "BUILD" in names:
            with open(os.path.join(folder, "BUILD")) as file:
                text = file.read()
            if LIBRARY.search(text):
                found[os.path.relpath(folder, root)] = text
    return found


def may_use(text):
    """Returns the packages that the first comment names; None if it names none; "all" for tests."""
    comment = COMMENT.search(text)
    words = comment.group().replace("\n# ", " ") if comment else ""
    if "Tests only:" in words:
        return "all"
    stated = MAY_USE.search(words)
    if stated is None:
        return None
    return {"backend/" + name for name in re.split(r", ", stated.group(1))} - {"backend/nothing of backend"}


def _folder(folder, texts):
    while folder and folder not in texts:
        folder = os.path.dirname(folder)
    return folder


def violations(texts, edges):
    found = []
    allowed = {}
    for package, text in sorted(texts.items()):
        allowed[package] = may_use(text)
        if allowed[package] is None:
            found.append(
                f"{package}/BUILD: begin with a comment that says what the folder is, then `May use: base, ...`."
            )
    for edge in sorted(set(edges)):
        source, target = _folder(edge.source, texts), _folder(edge.target, texts)
        folders = allowed.get(source)
        if edge.is_test or layering.is_test_package(edge.source) or not target or source == target or folders is None:
            continue
        if folders != "all" and target not in folders:
            found.append(f"{source}/BUILD does not say that it may use {target} ({edge.why})")
    return found
