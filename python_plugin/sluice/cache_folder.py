# SPDX-License-Identifier: Apache-2.0
"""Finds the cache folder, which keeps files for later runs: calibrated machines, decisions, compiled adapters."""

from __future__ import annotations

import os
import pwd

from .errors import InvalidArgument, NotFound

VARIABLE = "SLUICE_CACHE_DIR"


class NoCacheFolder(NotFound, OSError):
    """Neither the environment nor the user database names a folder for this user's files."""


def _home() -> str | None:
    """Returns HOME, else the home folder of the user database. A relative path is refused: it depends on the cwd."""
    named = os.environ.get("HOME", "")
    if not named.startswith("/"):
        try:
            named = pwd.getpwuid(os.getuid()).pw_dir
        except KeyError:
            return None
    return named if named.startswith("/") else None


def default() -> str | None:
    """Returns XDG_CACHE_HOME/sluice, else ~/.cache/sluice. As its specification says, a relative one is ignored."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base.startswith("/"):
        return os.path.join(base, "sluice")
    home = _home()
    return None if home is None else os.path.join(home, ".cache", "sluice")


def place(named: str | None = None) -> str:
    """Returns `named`, else SLUICE_CACHE_DIR, else the default. Raises NoCacheFolder."""
    found = named or os.environ.get(VARIABLE) or default()
    if found is None:
        raise NoCacheFolder(
            f"no folder for files that are kept: HOME is not an absolute path and user {os.getuid()} has no home "
            f"folder on this machine; set {VARIABLE} to a folder of your own"
        )
    return found


def for_code() -> str:
    """Returns `place()` for code that is loaded, which must be an absolute path."""
    found = place()
    if not found.startswith("/"):
        raise InvalidArgument(f"{VARIABLE} is {found!r}, from where no code is loaded: set it to an absolute path")
    return found
