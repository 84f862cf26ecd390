# SPDX-License-Identifier: Apache-2.0
"""Orders events between the ranks of a test by notes in the group's store, so that nothing depends on time.

Rank 0's process has the store. It must end last (`part`), or deliberately first (`until_gone`).
"""

from datetime import timedelta

import torch.distributed as dist

TIMEOUT = timedelta(seconds=100)  # below the deadline of a set of ranks: the error names the missing key


def _key(what, rank):
    return f"test/{what}/{rank}"


def store():
    """Returns the group's store, for uses other than notes."""
    return dist.distributed_c10d._get_default_store()


def say(what):
    """Writes this rank's note `what`."""
    store().set(_key(what, dist.get_rank()), "")


def hear(what, ranks):
    """Waits until all these ranks have written the note."""
    store().wait([_key(what, rank) for rank in ranks], TIMEOUT)


def part(ranks):
    """Called at the end by these ranks, which include 0. Keeps the store until all are done."""
    say("through")
    if dist.get_rank() == 0:
        hear("through", ranks)


def until_gone():
    """Waits until rank 0's process has ended."""
    try:
        store().wait([_key("never said", 0)], TIMEOUT)
    except dist.DistStoreError as error:
        raise AssertionError("rank 0 has not ended") from error
    except dist.DistNetworkError:
        pass
