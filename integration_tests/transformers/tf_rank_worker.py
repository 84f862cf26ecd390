# SPDX-License-Identifier: Apache-2.0
"""Runs one rank for tests of expert parallelism: the DeepSpeed tests' worker, with transformers instead."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _never_outlive() -> None:
    """Makes this process end with its parent, which is the tests or a rank."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(prepare: Callable[[], Any] | None = None) -> None:
    """Runs orders. Replies go to the inherited descriptor, so stdout is free. prepare: runs before torch's import."""
    _never_outlive()
    os.register_at_fork(after_in_child=_never_outlive)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    replies = os.fdopen(int(sys.argv[1]), "w")

    def answer(action: Any) -> None:
        try:
            value = {"result": action()}
        except Exception as error:
            text = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
            value = {"error": text}
        replies.write(json.dumps(value) + "\n")
        replies.flush()

    def start() -> None:
        here = Path(__file__).resolve().parent
        sys.path[:0] = [str(here), str(here.parent / "deepspeed")]  # the latter for its harness of ranks
        import rank_group

        if prepare is not None:
            prepare()
        import torch

        torch.set_num_threads(1)
        rank_group.seed_the_cpu_alone()
        rank_group.join(int(sys.argv[2]))

    answer(start)
    for line in sys.stdin:
        order = json.loads(line)
        module, _, function = order["target"].partition(":")
        answer(lambda: getattr(importlib.import_module(module), function)(**order["arguments"]))  # noqa: B023
    for child in multiprocessing.active_children():  # some hosts write checkpoints in child processes
        child.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
