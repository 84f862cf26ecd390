"""Ranks with one release of Megatron-Core in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rank_harness import Ranks

HERE = Path(__file__).resolve().parent
OLDEST = "0.16.1"  # in .venv itself
# In a folder of its own (third_party/setup/setup.sh): the newest release that is supported.
NEWEST = "0.19.2"
RELEASES = (OLDEST, NEWEST)


class MegatronRanks(Ranks):
    """As Ranks; every process has the CPU shim and `release`."""

    worker = HERE / "mg_rank_worker.py"
    imports = ("torch", "torch._inductor.utils")  # the latter takes seconds, and the shim needs it

    def __init__(self, world: int, release: str = OLDEST, **environment: str) -> None:
        if release != OLDEST:
            folder = Path(sys.prefix) / f"megatron-{release}"
            if not folder.is_dir():
                pytest.fail(f"{folder} is missing: run third_party/setup/setup.sh test")
            environment["PYTHONPATH"] = str(folder)
        super().__init__(world, **environment)
