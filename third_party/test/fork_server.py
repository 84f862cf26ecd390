# SPDX-License-Identifier: Apache-2.0
"""Starts Python scripts in forked processes that have their heavy imports already.

A rank of a test imports torch, which takes seconds, and then runs for milliseconds. So one process imports it once, and
forks for every rank: a script then runs as `python script arguments` would run it, from its first line to the end of
the interpreter, with its own environment, folder and descriptors. Settings that are read before the imports (malloc's,
the number of OpenMP threads) cannot change in a fork: start ranks with such settings as normal processes.
"""

from __future__ import annotations

import array
import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import types
from collections.abc import Mapping, Sequence
from typing import Any

_MOST_FDS = 16
_ANSWER = struct.Struct("=q")


class Process:
    """Implements the part of subprocess.Popen that tests use."""

    def __init__(self, answers: int, pid: int, stdin: Any) -> None:
        self._answers = answers
        self.pid = pid
        self.stdin = stdin
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the exit status, which is negative for a signal."""
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = _read_answer(self._answers)
            os.close(self._answers)
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal to the process, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills the process."""
        self.send_signal(signal.SIGKILL)


# Variables that may differ from the server's: a test sets them for a rank and no import reads them, or importing
# DeepSpeed or torch's compiler sets them in the tests' own process, and they do not change imports.
_LATE = (
    *("GLOO_SOCKET_IFNAME", "LOCAL_RANK", "LOCAL_SIZE", "MASTER_", "PYTEST_", "RANK", "WORLD_SIZE"),
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "TORCHINDUCTOR_CACHE_DIR"),
)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if not key.startswith(_LATE)}


class ForkServer:
    """Runs a process that has imported `preload` with `environment`; ends with this process. Threads may share it."""

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = _early(environment)
        command = [sys.executable, os.path.abspath(__file__), str(theirs.fileno()), *preload]
        self._process = subprocess.Popen(command, env=self._environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def differs_in(self, environment: Mapping[str, str]) -> list[str]:
        """Returns variables that might change the imports with `environment`."""
        found = _early(environment)
        return sorted(
            name for name in found.keys() | self._environment.keys() if found.get(name) != self._environment.get(name)
        )

    def start(
        self,
        script: str,
        arguments: Sequence[str | int],
        environment: Mapping[str, str],
        folder: str,
        output: int,
        has_stdin: bool = False,
    ) -> Process:
        """Runs a script; integer arguments are open descriptors, which are duplicated for the script."""
        answers, told = os.pipe()
        theirs, ours = os.pipe() if has_stdin else (os.open(os.devnull, os.O_RDONLY), -1)
        fds = [told, theirs, output, *(value for value in arguments if isinstance(value, int))]
        values = [None if isinstance(value, int) else value for value in arguments]
        order = pickle.dumps((script, values, dict(environment), folder))
        packed = array.array("i", fds)
        self._line.sendmsg([order], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, packed)])
        os.close(told)
        os.close(theirs)
        return Process(answers, _read_answer(answers), os.fdopen(ours, "wb") if has_stdin else None)


def _read_answer(fd: int) -> int:
    data = os.read(fd, _ANSWER.size)
    if len(data) != _ANSWER.size:
        raise RuntimeError("the fork server has ended; its output says why")
    return int(_ANSWER.unpack(data)[0])


# ---- in the server ----


def _reap(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with contextlib.suppress(BrokenPipeError):  # no waiter is left
            os.write(running[pid], _ANSWER.pack(os.waitstatus_to_exitcode(status)))
        os.close(running.pop(pid))


def _become(values: Sequence[str | None], environment: Mapping[str, str], folder: str, fds: Sequence[int]) -> list[str]:
    """Sets the child's descriptors, environment and folder, and returns its arguments."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdin, output, *rest = fds
    os.dup2(stdin, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(stdin)
    os.close(output)
    for fd in rest:
        os.set_inheritable(fd, True)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    numbers = iter(rest)
    return [str(next(numbers)) if value is None else value for value in values]


def _serve(line: socket.socket) -> tuple[str, list[str]] | None:
    """Forks until the other end is closed. In a child, returns what to run."""
    running: dict[int, int] = {}
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready = select.select([line, woken], [], [])[0]
        if woken in ready:
            os.read(woken, 4096)
            _reap(running)
        if line not in ready:
            continue
        order, ancillary, _, _ = line.recvmsg(1 << 20, socket.CMSG_SPACE(_MOST_FDS * 4))
        if not order:
            return None
        packed = array.array("i")
        for _, _, data in ancillary:
            packed.frombytes(data)
        told, *fds = packed
        script, values, environment, folder = pickle.loads(order)
        pid = os.fork()
        if pid == 0:
            for fd in (line.detach(), woken, wake, told, *running.values()):
                os.close(fd)
            return script, _become(values, environment, folder, fds)
        os.write(told, _ANSWER.pack(pid))
        running[pid] = told
        for fd in fds:
            os.close(fd)


def _is_alone() -> bool:
    """Waits until this process has one thread, as a fork has only one; returns whether other threads ended."""
    for _ in range(50):
        if len(os.listdir("/proc/self/task")) == 1:
            return True
        time.sleep(0.1)
    return False


def _main() -> tuple[str, list[str]] | None:
    line = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        __import__(name)
    if not _is_alone():
        raise RuntimeError(f"importing {sys.argv[2:]} leaves threads, which a fork does not have")
    sys.stdout.flush()  # or every child would print it again
    sys.stderr.flush()
    gc.collect()
    gc.freeze()  # collections in children skip what is imported
    return _serve(line)


def _run(script: str, arguments: list[str]) -> None:
    """Runs `python script arguments`."""
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    with open(script, encoding="utf-8") as file:
        code = compile(file.read(), script, "exec")
    exec(code, vars(main))


if __name__ == "__main__":
    _order = _main()
    if _order is not None:
        _run(*_order)
