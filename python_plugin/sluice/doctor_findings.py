# SPDX-License-Identifier: Apache-2.0
"""What `sluice doctor` reports: one finding a line."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

OK, NOTE, BAD = "ok", "note", "bad"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    check: str
    state: str
    detail: str
    advice: str = ""


def installed_version(distribution: str) -> str | None:
    """Of a distribution; None: it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
