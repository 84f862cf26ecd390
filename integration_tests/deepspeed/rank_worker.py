# SPDX-License-Identifier: Apache-2.0
"""One rank of `rank_harness.Ranks`: imports the host, joins the group, then runs its commands, line by line."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any


def _error(error: BaseException) -> dict[str, Any]:
    return {"error": {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}}


def main() -> None:
    """Runs the rank. Replies go to an inherited descriptor, so that any code may print."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: dies with the tests, even inside a collective
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the harness to a hanging rank
    replies = os.fdopen(int(sys.argv[1]), "w")

    def reply(value: dict[str, Any]) -> None:
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    try:
        sys.path.insert(0, str(Path(__file__).resolve().parent))
        import deepspeed
        import rank_group
        import torch

        # DeepSpeed uses its shared-memory op only for small all-reduces of inference. Without a cache it compiles for a
        # minute, and a build that is killed leaves a lock on which every later run waits forever.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
        torch.set_num_threads(1)
        rank_group.seed_the_cpu_alone()
        rank_group.join(int(sys.argv[2]))
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)  # uses the existing group
        reply({"result": None})
    except BaseException as error:
        reply(_error(error))
        raise
    for line in sys.stdin:
        order = json.loads(line)
        module, _, function = order["target"].partition(":")
        try:
            reply({"result": getattr(importlib.import_module(module), function)(**order["arguments"])})
        except Exception as error:
            reply(_error(error))
    # Do not end the process group: a rank whose peers were killed would wait.
    os._exit(0)


if __name__ == "__main__":
    main()
