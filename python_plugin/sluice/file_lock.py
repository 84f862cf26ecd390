# SPDX-License-Identifier: Apache-2.0
"""One process at a time, as far as the file system has locks.

Some have none: network file systems without a lock service, some of FUSE. What is guarded is written whole and named in
one step, so that without a lock the worst is that one of two writers is not seen. That is no reason to fail.
"""

from __future__ import annotations

import errno
import fcntl
import sys

_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
_told: set[str] = set()


def take(handle: int, path: str) -> bool:
    """Waits for the lock of an open file, which goes with the file. False, with a word on stderr once for each path:
    its file system has none. Other errors are raised (OSError).
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        if path not in _told:
            _told.add(path)
            print(
                f"sluice: {path} cannot be locked ({error.strerror}): of processes that write beside it at the same "
                "time one may not be seen",
                file=sys.stderr,
                flush=True,
            )
        return False
    return True
