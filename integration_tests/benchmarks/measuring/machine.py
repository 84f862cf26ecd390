# SPDX-License-Identifier: Apache-2.0
"""Describes the machine in a record: enough to repeat a run, but nothing that identifies the machine."""

import importlib.metadata
import os
import platform
from pathlib import Path


def machine() -> dict[str, object]:
    """Processor, cores this process may use, memory, kernel."""
    model = ""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name" and not model:
            model = value.strip()
        elif key.strip() == "flags" and not flags:
            flags = set(value.split())
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "isa": sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"}),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    """Versions of the packages that a run uses. Packages that are not installed are left out."""
    found = {"python": platform.python_version()}
    for name in ("torch", "deepspeed", "transformers", "megatron-core", "numpy", "sluice"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
