# SPDX-License-Identifier: Apache-2.0
"""Defines the findings that `sluice doctor` reports, one per line."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """Describes one line of the report."""

    check: str
    state: str
    detail: str
    advice: str = ""


def installed_version(distribution: str) -> str | None:
    """Returns the version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
