# SPDX-License-Identifier: Apache-2.0
"""Runs one rank of mg_ranks.MegatronRanks: the DeepSpeed tests' worker, under the CPU shim."""

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]
from rank_worker import main  # noqa: E402


def _prepare() -> None:
    importlib.import_module("cpu_shim")
    _fork_queues()


def _fork_queues() -> None:
    """Makes Megatron fork the process that returns a checkpoint's results; a spawned one would import torch again for
    each save. If writers are forks, as here, later releases also support a forked one (`mp_mode`)."""
    from torch import multiprocessing

    context_of = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: context_of("fork" if method == "spawn" else method)


if __name__ == "__main__":
    main(_prepare)
