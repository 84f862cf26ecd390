# SPDX-License-Identifier: Apache-2.0
"""Locks files, on file systems that have locks.

Some have none: network file systems without a lock service, some FUSE ones. The guarded files are written whole and
renamed atomically, so without a lock the worst outcome is that one of two writes is lost. That is no reason to fail.
"""

from __future__ import annotations

import errno
import fcntl
import sys

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_told: set[str] = set()


def take(handle: int, path: str) -> bool:
    """Waits for the lock of an open file; closing the file releases the lock. Returns False if the file system has no
    locks, with a warning on stderr once per path. Other errors are raised (OSError).
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        if path not in _told:
            _told.add(path)
            print(
                f"sluice: {path} cannot be locked ({error.strerror}): if several processes write at the same time, "
                "one of the writes may be lost",
                file=sys.stderr,
                flush=True,
            )
        return False
    return True
