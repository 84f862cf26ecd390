# SPDX-License-Identifier: Apache-2.0
"""Switches Sluice on in every process of the host's own tests, whose files stay unchanged.

Python finds this file through PYTHONPATH. SLUICE_TEST_SECTION, if it is set, is the section of every ds_config that has
none. Each pipeline batch, AutoEP forward and offloaded optimizer update that runs through Sluice appends the name of
the running test to the file SLUICE_TEST_RAN.
"""

import contextlib
import functools
import json
import os
from typing import Any

from sluice import autoload, settings

_SECTION = os.environ.get("SLUICE_TEST_SECTION")
_of_ds_config = settings.of_ds_config


def _note() -> None:
    with open(os.environ["SLUICE_TEST_RAN"], "a") as file:
        file.write(os.environ.get("PYTEST_CURRENT_TEST", "?").partition(" ")[0] + "\n")


@functools.cache
def _count() -> None:
    """Installs the counters, once per process, when the first engine reads its section."""
    _count_batches()
    count_updates()
    with contextlib.suppress(ImportError):  # a DeepSpeed without AutoEP
        _count_forwards()


def _count_batches() -> None:
    from sluice.adapters.deepspeed.pipeline.takeover import Takeover

    run = Takeover._exec_schedule

    def counting(self: Any, pipe_schedule: Any) -> None:
        before = self.batches
        run(self, pipe_schedule)
        if self.batches > before:
            _note()

    Takeover._exec_schedule = counting


def _count_forwards() -> None:
    from sluice.adapters.deepspeed.moe.autoep import SluiceAutoEPMoELayer

    run = SluiceAutoEPMoELayer._forward

    def counting(self: Any, hidden_states: Any) -> Any:
        out = run(self, hidden_states)
        _note()
        return out

    SluiceAutoEPMoELayer._forward = counting


@functools.cache
def count_updates() -> None:
    """Counts optimizer updates. Called once per process."""
    from sluice.adapters.deepspeed.optimizer.adam_ops import CpuAdamOp

    run = CpuAdamOp.adam_update

    def counting(self: Any, *args: Any) -> Any:
        before = self.updates
        out = run(self, *args)
        if self.updates > before:
            _note()
        return out

    CpuAdamOp.adam_update = counting


def _switched_on(section: Any, *rest: Any) -> Any:
    if section is None:
        _count()
        section = json.loads(_SECTION)
    return _of_ds_config(section, *rest)


autoload.TARGETS.update({name: "host_ops" for name in ("deepspeed.comm.torch", "deepspeed.ops.adam.cpu_adam")})
if _SECTION:
    settings.of_ds_config = _switched_on
