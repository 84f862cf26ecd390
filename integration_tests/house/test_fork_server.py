# SPDX-License-Identifier: Apache-2.0
"""Tests the server that forks ranks: a script runs as if Python had been started for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "third_party" / "test"))
from fork_server import ForkServer, Process

SCRIPT = """
import atexit, os, pickle, sys
class Thing:
    pass
atexit.register(lambda: print("at exit"))
print(sys.argv[1:3], __name__, os.environ.get("WORLD_SIZE"), "json" in sys.modules, os.getcwd())
print(type(pickle.loads(pickle.dumps(Thing()))).__name__, sys.path[0] == os.path.dirname(os.path.abspath(__file__)))
os.write(int(sys.argv[3]), b"through a descriptor")
print(sys.stdin.readline())
sys.exit(3)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    yield ForkServer(["json"], os.environ)


def _start(server: ForkServer, folder: Path, text: str, *arguments: str | int, **environment: str) -> Process:
    script = folder / "script.py"
    script.write_text(text)
    with (folder / "output").open("wb") as output:
        own = {**os.environ, **environment}
        return server.start(str(script), arguments, own, str(folder), output.fileno(), has_stdin=True)


def test_Start_Script_RunsAsPythonWouldRunIt(server: ForkServer, tmp_path: Path) -> None:
    read, write = os.pipe()
    process = _start(server, tmp_path, SCRIPT, "a", "-b", write, WORLD_SIZE="7")
    os.close(write)
    process.stdin.write(b"a line\n")
    process.stdin.close()
    assert process.wait(60) == 3 and process.poll() == 3
    assert os.read(read, 100) == b"through a descriptor" and os.read(read, 1) == b""
    os.close(read)
    lines = (tmp_path / "output").read_text().split("\n")
    assert lines == [f"['a', '-b'] __main__ 7 True {tmp_path}", "Thing True", "a line", "", "at exit", ""]


def test_Ends_ByExceptionAndBySignal_AreTold(server: ForkServer, tmp_path: Path) -> None:
    raises = _start(server, tmp_path, "raise ValueError('such a pity')")
    assert raises.wait(60) == 1 and "ValueError: such a pity" in (tmp_path / "output").read_text()
    waits = _start(server, tmp_path, "input()")
    with pytest.raises(subprocess.TimeoutExpired):
        waits.wait(0)
    waits.kill()
    assert waits.wait(60) == -9
