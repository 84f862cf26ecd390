# SPDX-License-Identifier: Apache-2.0
"""Changes modules of DeepSpeed after their import, for its own tests."""

import json
import os
from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """Makes a DeepSpeedCPUAdam that a test creates without an engine, and so without a config, use the library too, if
    the tested section has the optimizer. Disables the shared-memory op, which compiles for minutes and only serves
    small all-reduces of inference."""
    module.build_shm_op = lambda: None
    section = json.loads(os.environ.get("SLUICE_TEST_SECTION") or "{}")
    if not hasattr(module, "CPUAdamBuilder") or not section.get("optimizer"):
        return
    stock = module.CPUAdamBuilder

    class Builder(stock):  # type: ignore[misc, valid-type]
        def load(self, verbose: bool = True) -> Any:
            import sitecustomize
            from sluice.adapters.deepspeed.optimizer.adam_ops import CpuAdamOp

            sitecustomize.count_updates()
            return CpuAdamOp(lambda: stock().load())

    module.CPUAdamBuilder = Builder
