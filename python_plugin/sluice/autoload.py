# SPDX-License-Identifier: Apache-2.0
"""Installs the import hooks. Every `import torch` runs `load` (entry point `torch.backends`, sluice_autoload.py).

This module must import nothing heavy, never import a host, and never raise: an exception here would make `import torch`
fail. It only installs a finder: after the import of `deepspeed.runtime.engine` one of its methods is wrapped, and after
the import of transformers' registries or torch's pipeline schedules a name is added to them. The config of each engine
or model decides whether anything is swapped.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Maps a host module to Sluice's module with `install(host_module)`.
TARGETS = {
    "deepspeed.runtime.engine": "sluice.adapters.deepspeed.hook",
    "torch.distributed.pipelining.schedules": "sluice.adapters.pipelining.hook",
    "transformers.distributed.expert_parallel": "sluice.adapters.transformers.hook",
    "transformers.integrations.moe": "sluice.adapters.transformers.hook",
    "transformers.quantizers.auto": "sluice.adapters.transformers.hook",
}

# Errors of the hooks; `sluice doctor` shows them.
problems: list[str] = []


def load() -> None:
    """Installs the post-import hook once, and patches the hosts that are already imported."""
    try:
        for name in TARGETS:
            module = sys.modules.get(name)
            if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
                _patch(module)
        if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _Finder())
    except Exception as error:
        _report("the import hook could not be installed", error)


def _patch(module: ModuleType) -> None:
    """Patches a host module. Never raises: the host is then imported as without Sluice, and the run has no banner."""
    try:
        importlib.import_module(TARGETS[module.__name__]).install(module)
    except Exception as error:
        _report(f"{module.__name__} could not be prepared", error)


def _report(what: str, error: Exception) -> None:
    problems.append(f"{what}: {type(error).__name__}: {error}")
    try:
        print(f"sluice: {problems[-1]}; run `python -m sluice doctor`", file=sys.stderr, flush=True)
    except Exception:  # stderr may be closed
        return


class _Finder:
    """Finds nothing itself: the other finders find a target, and this one adds a step after its loading."""

    def __init__(self) -> None:
        self._own = threading.local()  # `busy` is per thread: two threads may import targets at the same time

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name not in TARGETS or getattr(self._own, "busy", False):
            return None
        self._own.busy = True
        try:
            spec = _find_with_others(self, name, path, target)
            loader = getattr(spec, "loader", None)
            if loader is not None and hasattr(loader, "exec_module"):
                loader.exec_module = _then_patch(loader.exec_module)
        except Exception as error:
            _report(f"the loader of {name} could not be prepared", error)
            return None
        finally:
            self._own.busy = False
        return spec


def _find_with_others(own: _Finder, name: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
    for finder in sys.meta_path:
        if finder is own:
            continue
        find_spec = getattr(finder, "find_spec", None)
        spec = find_spec(name, path, target) if find_spec else None
        if spec is not None:
            return spec
    return None


def _then_patch(exec_module: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Wraps `exec_module` alone: the loader keeps its type, so tracebacks, `inspect` and debuggers find the source."""

    def execute(module: ModuleType) -> None:
        exec_module(module)
        _patch(module)

    return execute
