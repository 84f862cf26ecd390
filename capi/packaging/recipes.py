# SPDX-License-Identifier: Apache-2.0
"""Writes recipes with which conda and Spack repackage the archive of the C library."""

from __future__ import annotations

import hashlib
import os

import elf
import tree


def write(folder: str, archive: str, url: str, version: str) -> None:
    """Writes the recipes for an archive that users will download from the folder at `url`."""
    with open(archive, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    homepage = url.rstrip("/")
    values = {
        "VERSION": version,
        "HOMEPAGE": homepage,
        "URL": f"{homepage}/{os.path.basename(archive)}",
        "SHA256": digest,
        "GLIBC": ".".join(map(str, elf.GLIBC_CAPACITY)),
    }
    tree.write(os.path.join(folder, "conda", "recipe.yaml"), tree.filled("conda-recipe.yaml.in", values))
    tree.write(os.path.join(folder, "spack", "repo.yaml"), "repo:\n  namespace: sluice\n")
    package = os.path.join(folder, "spack", "packages", "sluice", "package.py")
    tree.write(package, tree.filled("spack-package.py.in", values))
