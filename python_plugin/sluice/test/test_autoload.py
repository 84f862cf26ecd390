# SPDX-License-Identifier: Apache-2.0
"""Tests the import hook: threads that import hosts at the same time, and other packages of the same name."""

import importlib.machinery
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from sluice import autoload

SLOW, OTHER = "transformers.integrations.moe", "deepspeed.runtime.engine"


class _Loader:
    def exec_module(self, module: Any) -> None: ...


class _Finder:
    """A finder that returns one target only after another thread has looked up the other."""

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


@pytest.mark.parametrize("name", ["sluice.py", "sluice/__init__.py"])
def test_ImportTorch_AnotherSluiceComesFirst_IsNotRunAndIsNamed(tmp_path: Path, name: str) -> None:
    other = tmp_path / name
    other.parent.mkdir(exist_ok=True)
    other.write_text("raise SystemExit('the other one was run')\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import torch; print('imported')"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "imported\n"), done.stderr
    assert f"sluice: not loaded: {other} comes before " in done.stderr


def test_Script_NamedAsThePackage_RunsOnce(tmp_path: Path) -> None:
    script = tmp_path / "sluice.py"
    script.write_text("print(__name__)\nimport torch\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, "__main__\n"), done.stderr
