# SPDX-License-Identifier: Apache-2.0
"""Starts ranks with a given release of Megatron-Core."""

import os
import sys
from pathlib import Path

import pytest
from rank_harness import Ranks

HERE = Path(__file__).resolve().parent
OLDEST = "0.16.1"  # in .venv itself
# An unsupported release that replaces all others (third_party/test/megatron_canary.sh).
CANARY = os.environ.get("SLUICE_MEGATRON_CANARY")
# Releases in separate folders (third_party/setup/setup.sh): the newest supported one, and those between.
NEWEST = "0.19.2"
BETWEEN = () if CANARY else ("0.17.1", "0.18.2")
RELEASES = (CANARY,) if CANARY else (OLDEST, NEWEST)
# All of them, for parameters of tests.
EVERY = [*RELEASES, *(pytest.param(release, marks=pytest.mark.full) for release in BETWEEN)]


class MegatronRanks(Ranks):
    """Ranks whose processes have the CPU shim and `release`."""

    host = "megatron"
    imports = (
        *("torch", "cpu_shim", "megatron.core.transformer.moe.moe_layer", "megatron.core.dist_checkpointing"),
        *("megatron.core.models.gpt.gpt_layer_specs", "megatron.core.models.gpt.gpt_model"),
        *("megatron.core.distributed", "megatron.core.optimizer", "megatron.core.pipeline_parallel"),
    )

    def __init__(self, world: int, release: str = OLDEST) -> None:
        folders = [str(HERE)]
        if release != OLDEST:
            folder = Path(sys.prefix) / f"megatron-{release}"
            if not folder.is_dir():
                pytest.fail(f"{folder} is missing: run third_party/setup/setup.sh test")
            folders.append(str(folder))
        self.python_path = os.pathsep.join(folders)
        super().__init__(world)
