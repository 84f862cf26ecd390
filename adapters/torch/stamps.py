# SPDX-License-Identifier: Apache-2.0
"""Writes and checks the stamp next to the adapter's shared object: its sources, its platform, and its sha256.

A stamp proves nothing if other users can write it, so the owners of the files are checked as well. A stamp
distinguishes builds of machines that share a home folder, and detects files that are truncated or were changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import stat
import subprocess
import sys
from collections.abc import Iterable
from typing import Optional

import torch

from ... import file_trust

MOST_BYTES = 65536  # of a stamp
Wanted = dict[str, Optional[str]]  # None: any value


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError):  # not glibc
        return " ".join(platform.libc_ver())


def _words_of(compiler: str) -> str:
    """Returns the compiler's output for --version."""
    try:
        done = subprocess.run(
            [compiler, "--version"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.partition("\n")[0].strip() or "unknown"


def wanted(paths: Iterable[str], flags: tuple[str, ...], compiler: str | None) -> Wanted:
    """Returns the stamp of an object that is made here from these files. If there is no compiler here, any will do."""
    digest = hashlib.sha256(repr(flags).encode())
    for path in paths:
        with open(path, "rb") as file:
            digest.update(file.read())
    return {
        "made_from": digest.hexdigest(),
        "torch": f"{torch.__version__} {torch.version.git_version} {int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        "machine": platform.machine(),
        "libc": _libc(),
        "compiler": None if compiler is None else _words_of(compiler),
        "python": f"{sys.implementation.cache_tag}{sys.abiflags}",
    }


def for_any_build(fitting: Wanted) -> Wanted:
    """Returns the fields that must match for any build of this release of torch (CPU or CUDA), with any Python and
    compiler: the shared object does not link to Python, and torch's own libraries are made from the same sources. The
    tag of the wheel says which C library the object needs."""
    release, _, sources = (fitting["torch"] or "").partition(" ")
    return {
        "made_from": fitting["made_from"],
        "torch": f"{release.partition('+')[0]} {sources}",
        "machine": fitting["machine"],
    }


def short(fitting: Wanted) -> str:
    """Returns a digest as the name of a folder."""
    return hashlib.sha256(json.dumps(fitting, sort_keys=True).encode()).hexdigest()[:16]


def _sha256(path: str, also: tuple[int, ...]) -> str:
    digest = hashlib.sha256()
    with os.fdopen(file_trust.open_ours(path, also), "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def why_not(path: str, fitting: Wanted, also: tuple[int, ...] = ()) -> str | None:
    """Returns None if the object may be loaded, else the reason; "": there is no object.

    also  owners that are trusted like this user
    """
    try:
        with os.fdopen(file_trust.open_ours(f"{path}.stamp", also), errors="replace") as file:
            said = json.loads(file.read(MOST_BYTES))
        found = _sha256(path, also)
    except FileNotFoundError:
        return ""
    except (ValueError, RecursionError):
        return f"{path} is built again: it has no valid stamp"
    except OSError as error:
        return f"{path} is not loaded: {error.filename}: {error.strerror}"
    if not isinstance(said, dict):
        return f"{path} is built again: it has no valid stamp"
    for name, value in fitting.items():
        if value is not None and said.get(name) != value:
            return f"{path} does not fit: its {name} is {said.get(name)!r}, here it is {value!r}"
    if said.get("sha256") != found:
        return f"{path} is not loaded: it is not what its stamp says (sha256), so it was changed or is incomplete"
    return None


def write(made: str, stamp: str, fitting: Wanted) -> None:
    """Writes the stamp of a new shared object. Removes others' permission to write either (umask 002)."""
    os.chmod(made, stat.S_IMODE(os.stat(made).st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
    with open(stamp, "w") as file:
        json.dump({**fitting, "sha256": _sha256(made, ())}, file, indent=1)
        file.write("\n")
        os.fchmod(file.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))
