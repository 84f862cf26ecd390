# SPDX-License-Identifier: Apache-2.0
"""Writes archives reproducibly: the same tree gives the same bits, independent of time, folder and user."""

from __future__ import annotations

import gzip
import os
import subprocess
import tarfile

from libraries import ROOT


def source_date() -> int:
    """Returns the date of all files: SOURCE_DATE_EPOCH, else the commit's date, else the oldest that zip can store."""
    given = os.environ.get("SOURCE_DATE_EPOCH")
    if given:
        return int(given)
    done = subprocess.run(["git", "-C", ROOT, "log", "-1", "--format=%ct"], capture_output=True, text=True)
    return int(done.stdout) if done.returncode == 0 else 315532800  # 1980-01-01


def entries(top: str) -> list[str]:
    """Returns the relative path of every file, link and folder below `top`, sorted."""
    found = []
    for where, folders, names in os.walk(top):
        found += [os.path.relpath(os.path.join(where, name), top) for name in folders + names]
    return sorted(found)


def _clean(entry: tarfile.TarInfo, seconds: int) -> tarfile.TarInfo:
    entry.mtime = seconds
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    if entry.isfile():
        entry.mode = 0o755 if entry.mode & 0o100 else 0o644
    elif entry.isdir():
        entry.mode = 0o755
    return entry


def write(path: str, top: str, name: str, seconds: int) -> None:
    """Packs the tree `top` as the folder `name` into the .tar.gz at `path`."""
    with open(path, "wb") as raw, gzip.GzipFile("", "wb", 9, raw, mtime=seconds) as packed:
        with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as tar:
            for inside in ["", *entries(top)]:
                entry = tar.gettarinfo(os.path.join(top, inside), os.path.join(name, inside).rstrip("/"))
                entry = _clean(entry, seconds)
                if entry.isfile():
                    with open(os.path.join(top, inside), "rb") as file:
                        tar.addfile(entry, file)
                else:
                    tar.addfile(entry)
