# SPDX-License-Identifier: Apache-2.0
"""Jobs of test_ranks.py: the ways in which a rank ends."""

import os
import signal
import threading

import torch.distributed as dist


def ends(how):
    """Rank 1 ends as `how` says; the others return."""
    if dist.get_rank() != 1:
        return how
    print("last words", flush=True)
    if how == "raises":
        raise ValueError("such a pity")
    if how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hangs":
        threading.Event().wait()
    return how
