# SPDX-License-Identifier: Apache-2.0
"""Adds Sluice's schedules to `get_schedule_class` of torch.distributed.pipelining.

Torch has no registry of schedules: the function contains its table. So the function is wrapped before it is imported.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

# Names in lower case; ":POLICY" may follow.
NAMES = ("sluice", "sluicesingle")


def install(module: ModuleType) -> None:
    """Wraps the function, once. Raises if this torch does not have it; the loader reports that."""
    original = getattr(module, "get_schedule_class", None)
    if original is None:
        raise RuntimeError("this torch has no get_schedule_class, so it knows no schedule by name")
    if hasattr(original, "_sluice_original"):
        return

    @functools.wraps(original)
    def get_schedule_class(schedule_name: str) -> Any:
        if schedule_name.lower().partition(":")[0] not in NAMES:
            return original(schedule_name)
        from sluice.adapters.pipelining import schedules

        return schedules.named(schedule_name)

    get_schedule_class._sluice_original = original  # type: ignore[attr-defined]
    module.get_schedule_class = get_schedule_class  # type: ignore[attr-defined]
