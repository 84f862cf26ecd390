# SPDX-License-Identifier: Apache-2.0
"""Compares the ABI of the packed library with the record of the newest release."""

from __future__ import annotations

import os
import subprocess
import sys

from libraries import ROOT, Failure

sys.path.insert(0, os.path.join(ROOT, "capi", "bindings"))
import generate


def newest(version: str) -> str | None:
    """Returns the tag of the newest release whose ABI this version must keep, or None: the same major version, and
    before 1.0 also the same minor version."""
    major, minor, _ = version.split(".")
    kept = f"v{major}.{minor}.*" if major == "0" else f"v{major}.*"
    command = ["git", "-C", ROOT, "tag", "--list", kept, "--sort=-version:refname"]
    done = subprocess.run(command, capture_output=True, text=True)
    return next(iter(done.stdout.split()), None)  # a tree without git has no tags


def check_abi(version: str) -> None:
    tag = newest(version)
    broken = generate.since(tag) if tag is not None else []
    if broken:
        raise Failure(f"the ABI of {tag} is broken, see capi/abi/ABI.md:\n" + "\n".join(broken))
