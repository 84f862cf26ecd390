# SPDX-License-Identifier: Apache-2.0
"""Makes a DeepSpeedCPUAdam that a test creates without an engine, and so without a config, use the library too."""

import json
import os
from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """Changes deepspeed.ops.adam.cpu_adam, if the tested section has the optimizer."""
    if not json.loads(os.environ.get("SLUICE_TEST_SECTION") or "{}").get("optimizer"):
        return
    stock = module.CPUAdamBuilder

    class Builder(stock):  # type: ignore[misc, valid-type]
        def load(self, verbose: bool = True) -> Any:
            import sitecustomize
            from sluice.adapters.deepspeed.optimizer.cpu_adam import CpuAdamOp

            sitecustomize.count_updates()
            return CpuAdamOp(lambda: stock().load())

    module.CPUAdamBuilder = Builder
