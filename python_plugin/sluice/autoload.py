# SPDX-License-Identifier: Apache-2.0
"""What `import torch` calls in every process (by the `torch.backends` entry point, sluice_autoload.py).

It must import nothing heavy, never import a host, and never raise: an exception here would make `import torch` fail.
So it only leaves a note with the import system: when `deepspeed.runtime.engine` has been imported, wrap one method of
it; when transformers' registries or torch's pipeline schedules have been imported, put a name into them. Whether
anything is swapped is decided there, by the config of each engine or model.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# Host module -> module of ours with `install(host_module)`.
TARGETS = {
    "deepspeed.runtime.engine": "sluice.adapters.deepspeed.hook",
    "torch.distributed.pipelining.schedules": "sluice.adapters.pipelining.hook",
    "transformers.distributed.expert_parallel": "sluice.adapters.transformers.hook",
    "transformers.integrations.moe": "sluice.adapters.transformers.hook",
    "transformers.quantizers.auto": "sluice.adapters.transformers.hook",
}

# What went wrong while loading; `sluice doctor` shows it.
problems: list[str] = []


def load() -> None:
    """Installs the post-import hook, once; patches at once what is already imported."""
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
    """Never raises: a host must import as if Sluice were not there. A switched-on run then misses its banner."""
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
    """Finds nothing itself: lets the others find a target and adds a step after its loading."""

    def __init__(self) -> None:
        self._own = threading.local()  # `busy`: another thread may import another target meanwhile

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
    """The loader keeps its type, so that tracebacks, `inspect` and debuggers find the source as before."""

    def execute(module: ModuleType) -> None:
        exec_module(module)
        _patch(module)

    return execute
