# SPDX-License-Identifier: Apache-2.0
"""A DeepSpeedCPUAdam that a test makes without an engine computes by the library too, without a config to say so."""

from __future__ import annotations

import json
import os
from types import ModuleType
from typing import Any


def install(module: ModuleType) -> None:
    """Of deepspeed.ops.adam.cpu_adam, where the section under test has the optimizer."""
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
