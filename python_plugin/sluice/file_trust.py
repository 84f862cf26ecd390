# SPDX-License-Identifier: Apache-2.0
"""Whose the files are that Sluice reads back, and who else can change them.

Code is loaded from nowhere that others can write to. Between a look at a folder and the load of what lies in it only
this user and root can change anything there, so a look is enough. Root may do anything anyhow; so may the user.
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

MOST_LINKS = 40  # on the way to a folder, as in the kernel


class NotOurs(PermissionError):
    """Others can change it. strerror says who, and what to do."""


def _user(uid: int) -> str:
    with contextlib.suppress(KeyError):
        return f"user {pwd.getpwuid(uid).pw_name}"
    return f"user {uid}"


def _is_private(gid: int) -> bool:
    """A group of this user alone, as is the custom where files are group-writable from the start (umask 002)."""
    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return me.pw_uid != 0 and gid == me.pw_gid and group.gr_name == me.pw_name and set(group.gr_mem) <= {me.pw_name}


@functools.cache
def _outside() -> int | None:
    """The owner that all files of users outside a container seem to have, root's among them; None: all are inside."""
    try:
        with open("/proc/self/uid_map") as file:
            if file.read().split() == ["0", "0", "4294967295"]:
                return None
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _strange_owner(info: os.stat_result, also: tuple[int | None, ...] = ()) -> str | None:
    """Whose it is, where it is neither this user's nor root's; also: owners that are as good."""
    return None if info.st_uid in (0, os.geteuid(), *also) else _user(info.st_uid)


def _writers(info: os.stat_result) -> str | None:
    """Who can write it besides its owner."""
    if info.st_mode & stat.S_IWOTH:
        return "every user"
    return "its group" if info.st_mode & stat.S_IWGRP and not _is_private(info.st_gid) else None


def _demand(path: str, owner: str | None, writers: str | None) -> None:
    """Raises NotOurs if there is one of either."""
    instead = f"or set {cache_folder.VARIABLE} to a folder that only you can write"
    if owner is not None:
        raise NotOurs(errno.EPERM, f"it belongs to {owner}: have it removed, {instead}", path)
    if writers is not None:
        raise NotOurs(errno.EPERM, f"{writers} can write it: chmod go-w {path}, {instead}", path)


# ---- folders of code ----


def make_folder(path: str) -> None:
    """With its parents, each for this user alone; what is there stays as it is."""
    if os.path.isdir(path):
        return
    make_folder(os.path.dirname(path) or os.curdir)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def check_folder(path: str, may_lack: bool = False) -> None:
    """Raises NotOurs unless this user and root alone decide what lies in a folder. `path` is absolute.

    may_lack  where it is not there yet, the part of it that is there counts

    Who can write a folder can put another in the place of what lies in it, so all folders and links on the way count;
    where a folder is sticky (/tmp), only owners can.
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
    is_sticky = not is_last and info.st_mode & stat.S_ISVTX  # whose the next one is will be seen there
    owner = _strange_owner(info, () if is_last else (_outside(),))
    _demand(path, owner, None if is_sticky else _writers(info))


# ---- files ----


def open_ours(path: str, also: tuple[int | None, ...] = ()) -> int:
    """A descriptor of a regular file, no link, that nobody else can change. Raises NotOurs, or another OSError."""
    try:
        # O_NONBLOCK: a FIFO in its place must not hold the run up.
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotOurs(errno.EPERM, "it is a symbolic link: remove it", path) from error
        raise
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise NotOurs(errno.EPERM, "it is no regular file: remove it", path)
        _demand(path, _strange_owner(info, also), _writers(info))
    except NotOurs:
        os.close(handle)
        raise
    return handle


def open_data(path: str) -> IO[str]:
    """Text that an earlier run left. Of others it is refused (NotOurs) in the default cache folder.

    A file in another place is the user's choice; that others can write it is said once.
    """
    default = cache_folder.default()
    if default is not None and os.path.dirname(os.path.abspath(path)) == os.path.abspath(default):
        return os.fdopen(open_ours(path))
    warn(path)
    return open(path)


_said: set[str] = set()


def warn(path: str) -> None:
    """Once for each path, a word on stderr where every user, or a group, can write a file that this user named."""
    with contextlib.suppress(OSError):
        writers = _writers(os.stat(path))
        if writers is not None and path not in _said:
            _said.add(path)
            text = f"sluice: {path} is used although {writers} can write it: chmod go-w {path}"
            print(text, file=sys.stderr, flush=True)
