"""Torch's own launcher, as users start several ranks with it."""

from __future__ import annotations

import sys
from pathlib import Path


def launcher(folder: Path) -> list[str]:
    """What stands before a script and its arguments; logs go below `folder`, since those in /tmp would stay there."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*words, "--log-dir", str(folder / "elastic")]
