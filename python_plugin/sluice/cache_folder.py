# SPDX-License-Identifier: Apache-2.0
"""Which folder Sluice keeps files in for later runs: measured machines, decisions, adapters that were compiled."""

from __future__ import annotations

import os
import pwd

from .errors import InvalidArgument, NotFound

VARIABLE = "SLUICE_CACHE_DIR"


class NoCacheFolder(NotFound, OSError):
    """Nothing says where this user's files lie."""


def _home() -> str | None:
    """HOME, else what the machine's list of users says. A relative one would be whatever folder a run starts in."""
    named = os.environ.get("HOME", "")
    if not named.startswith("/"):
        try:
            named = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return named if named.startswith("/") else None


def default() -> str | None:
    """XDG_CACHE_HOME/sluice, else ~/.cache/sluice. A relative XDG_CACHE_HOME is none, as its specification says."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return os.path.join(base, "sluice")
    home = _home()
    return None if home is None else os.path.join(home, ".cache", "sluice")


def place(named: str | None = None) -> str:
    """As named, else SLUICE_CACHE_DIR, else the default. Raises NoCacheFolder."""
    found = named or os.environ.get(VARIABLE) or default()
    if found is None:
        raise NoCacheFolder(
            f"no folder for files that are kept: HOME is not an absolute path and user {os.getuid()} has no home "
            f"folder on this machine; set {VARIABLE} to a folder of your own"
        )
    return found


def for_code() -> str:
    """The same where code is loaded from: not relative to whatever folder a run starts in."""
    found = place()
    if not found.startswith("/"):
        raise InvalidArgument(f"{VARIABLE} is {found!r}, from where no code is loaded: set it to an absolute path")
    return found
