# SPDX-License-Identifier: Apache-2.0
"""Checks which users own, and can change, the files that Sluice reads back.

Code is never loaded from folders that other users can write to. Between the check of a folder and the load from it only
this user and root can change the folder, so one check is enough. Root and the user themselves are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import grp
import os
import pwd
import stat
import sys
from typing import IO

from . import cache_folder

MOST_LINKS = 40  # symbolic links in a path, the kernel's limit


class NotOurs(PermissionError):
    """Other users can change the file or folder. strerror says which, and what to do."""


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _is_private(gid: int) -> bool:
    """Returns whether the group has this user alone, as on systems that create group-writable files (umask 002)."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return me.pw_uid != 0 and gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


@functools.cache
def _outside() -> int | None:
    """Returns the uid that a container shows for all users outside of it, root included; None: no user is outside."""
    try:
        with open("/proc/self/uid_map") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return None
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _strange_owner(info: os.stat_result, also: tuple[int | None, ...] = ()) -> str | None:
    """Returns the owner if it is neither this user, root nor one of `also`."""
    return None if info.st_uid in (0, os.geteuid(), *also) else _user(info.st_uid)


def _writers(info: os.stat_result) -> str | None:
    """Returns the users who can write the file in addition to its owner."""
    if info.st_mode & stat.S_IWOTH:
        return "every user"
    return "its group" if info.st_mode & stat.S_IWGRP and not _is_private(info.st_gid) else None


def _demand(path: str, owner: str | None, writers: str | None) -> None:
    """Raises NotOurs if an owner or writers are given."""
    instead = f"or set {cache_folder.VARIABLE} to a folder that only you can write"
    if owner is not None:
        raise NotOurs(errno.EPERM, f"it belongs to {owner}: have it removed, {instead}", path)
    if writers is not None:
        raise NotOurs(errno.EPERM, f"{writers} can write it: chmod go-w {path}, {instead}", path)


# ---- folders of code ----


def make_folder(path: str) -> None:
    """Creates a folder and its parents for this user alone. Existing folders keep their mode."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path) or os.curdir)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def check_folder(path: str, may_lack: bool = False) -> None:
    """Raises NotOurs unless this user and root alone can change the contents of a folder. `path` is absolute.

    may_lack  the folder may be missing; the existing part of the path is then checked

    A user who can write a folder can replace its entries, so all folders and links of the path are checked. In a sticky
    folder (/tmp) only the owners of entries can replace them.
    """
    done, todo, links = "/", path.split("/"), 0
    _check_one(done)
    while todo:
        name = todo.pop(0)
        if name in ("", ".", ".."):
            done = os.path.dirname(done) if name == ".." else done
            continue
        here = os.path.join(done, name)
        if may_lack and not os.path.lexists(here):
            return
        info = os.lstat(here)
        if not stat.S_ISLNK(info.st_mode):
            _check_one(here)
            done = here
            continue
        _demand(here, _strange_owner(info, (_outside(),)), None)
        links += 1
        if links > MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(here)
        done = "/" if target.startswith("/") else done
        todo = target.split("/") + todo
    _check_one(done, is_last=True)


def _check_one(path: str, is_last: bool = False) -> None:
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    is_sticky = not is_last and info.st_mode & stat.S_ISVTX  # the owner of the next entry is checked in its own turn
    owner = _strange_owner(info, () if is_last else (_outside(),))
    _demand(path, owner, None if is_sticky else _writers(info))


# ---- files ----


def open_ours(path: str, also: tuple[int | None, ...] = ()) -> int:
    """Opens a regular file, not a link, that no other user can change. Raises NotOurs, or another OSError."""
    try:
        # O_NONBLOCK: the open of a FIFO must not block.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(errno.EPERM, "it is a symbolic link: remove it", path) from error
        raise
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise NotOurs(errno.EPERM, "it is not a regular file: remove it", path)
        _demand(path, _strange_owner(info, also), _writers(info))
    except NotOurs:
        os.close(handle)
        raise
    return handle


def open_data(path: str) -> IO[str]:
    """Opens a text file of an earlier run. In the default cache folder, a file of another user raises NotOurs.

    A file in another folder is the user's choice: if others can write it, a warning is printed once.
    """
    default = cache_folder.default()
    if default is not None and os.path.dirname(os.path.abspath(path)) == os.path.abspath(default):
        return os.fdopen(open_ours(path))
    warn(path)
    return open(path)


_said: set[str] = set()


def warn(path: str) -> None:
    """Warns on stderr, once per path, if all users or a group can write a file that this user named."""
    with contextlib.suppress(OSError):
        writers = _writers(os.stat(path))
        if writers is not None and path not in _said:
            _said.add(path)
            text = f"sluice: {path} is used although {writers} can write it: chmod go-w {path}"
            print(text, file=sys.stderr, flush=True)
