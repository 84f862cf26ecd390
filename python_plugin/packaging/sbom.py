# SPDX-License-Identifier: Apache-2.0
"""Writes a release's bill of materials as CycloneDX 1.6: its files, build tools and run-time dependencies."""

from __future__ import annotations

import datetime
import hashlib
import os
import uuid

import install
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

LICENCE = "Apache-2.0"


def sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def _licences(text: str) -> list:
    return [LicenseFactory().make_from_string(text)]


def _hashes(digest: str) -> list[HashType]:
    return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]


def _file(path: str, version: str) -> Component:
    name = os.path.basename(path)
    return Component(
        type=ComponentType.FILE,
        name=name,
        bom_ref=name,
        version=version,
        licenses=_licences(LICENCE),
        hashes=_hashes(sha256(path)),
    )


def _torch(about: dict[str, str]) -> Component:
    """Describes a release of torch for which the wheel contains an adapter. The adapter contains no code of torch."""
    version = about["version"]
    return Component(
        type=ComponentType.LIBRARY,
        name="torch",
        bom_ref=f"torch-{version}",
        version=version,
        scope=ComponentScope.OPTIONAL,
        licenses=_licences(about["licence"]),
        hashes=_hashes(about["sha256"]),
        purl=PackageURL("pypi", None, "torch", version),
        properties=[Property(name="sluice:compiled-against", value=about["name"])],
    )


def text(paths: list[str], torches: list[dict[str, str]], version: str, commit: str, seconds: int) -> str:
    """Returns the bill, which is the same for the same files, torches and commit."""
    own = Component(
        type=ComponentType.LIBRARY,
        name="sluice",
        bom_ref="sluice",
        version=version,
        licenses=_licences(LICENCE),
        properties=[Property(name="sluice:commit", value=commit)],
    )
    cffi = Component(
        type=ComponentType.LIBRARY,
        name="cffi",
        bom_ref="cffi",
        version=install.CFFI,
        scope=ComponentScope.REQUIRED,
        licenses=_licences("MIT"),
        purl=PackageURL("pypi", None, "cffi"),
    )
    files = [_file(path, version) for path in paths]
    needed = [cffi, *map(_torch, torches)]
    bom = Bom(components=[*files, *needed], serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"sluice:{commit}"))
    bom.metadata.component = own
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    bom.register_dependency(own, files)
    for file in files:
        bom.register_dependency(file, needed if file.name.endswith(".whl") else [])
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"
