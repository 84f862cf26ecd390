"""The note with the import system, where threads import hosts at one time."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
from typing import Any

from sluice import autoload

SLOW, OTHER = "transformers.integrations.moe", "deepspeed.runtime.engine"


class _Loader:
    def exec_module(self, module: Any) -> None: ...


class _Finder:
    """Answers for one target when the other has been looked up from another thread."""

    def __init__(self) -> None:
        self.is_asked, self.may_answer = threading.Event(), threading.Event()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == SLOW:
            self.is_asked.set()
            assert self.may_answer.wait(60)
        return importlib.machinery.ModuleSpec(name, _Loader())


def test_FindSpec_TwoThreadsImportTwoHosts_BothAreSeen(monkeypatch) -> None:
    own, others = autoload._Finder(), _Finder()
    monkeypatch.setattr(sys, "meta_path", [own, others])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(own.find_spec(SLOW)))
    thread.start()
    assert others.is_asked.wait(60)
    found.append(own.find_spec(OTHER))
    others.may_answer.set()
    thread.join(60)
    assert [spec.name if spec else None for spec in found] == [OTHER, SLOW]
    assert all(spec.loader.exec_module.__name__ == "execute" for spec in found)  # ours comes after the loader's
