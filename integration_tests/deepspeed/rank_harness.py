# SPDX-License-Identifier: Apache-2.0
"""Runs ranks as persistent processes: a test names a function and every rank runs it, with a deadline.

Starting a process group takes longer than most cases, so tests share sets of ranks. After an unexpected error, a missed
deadline or a dead rank, the set ends and a later test gets a new set. Importing torch and DeepSpeed takes seconds, so
ranks are forks of a process that has imported them, and a new set takes a tenth of a second. Sets whose tests have made
many process groups end between two tests, because each gloo group has a thread that wakes a hundred times a second
until its process ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1] / "third_party" / "test"))
from fork_server import ForkServer, Process  # noqa: E402

WORKER = str(HERE / "rank_worker.py")
_servers: list[tuple[Sequence[str], ForkServer]] = []
_starting = threading.Lock()


def _server_for(imports: Sequence[str], environment: dict[str, str]) -> ForkServer:
    """Returns the fork server with these imports and this environment, which is started at the first use."""
    with _starting:
        for known, server in _servers:
            if known == imports and not server.differs_in(environment):
                return server
        _servers.append((imports, ForkServer(imports, environment)))
        return _servers[-1][1]


START_DEADLINE_S = 200.0
DEADLINE_S = 300.0  # only ends hangs: on a busy machine a case can take many times longer
MOST_GROUPS = 20  # a set with more process groups on a rank ends after the test

_sets: weakref.WeakSet[Ranks] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def ranks_rest() -> Iterator[None]:
    """Ends busy sets of ranks after every test of a folder whose conftest.py imports this fixture."""
    yield
    end_busy_sets()


def end_busy_sets() -> None:
    """Ends sets with many process groups. A later test gets new sets."""
    for ranks in list(_sets):
        if ranks.groups() > MOST_GROUPS:
            ranks.stop()


def _gloo_threads(pid: int) -> int:
    names = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process may end
        for task in Path(f"/proc/{pid}/task").iterdir():
            names.append((task / "comm").read_text().strip())
    return names.count("gloo_tcp_loop")


def fixture_of(make: Callable[[], Ranks], scope: str = "module") -> Any:
    """Returns a fixture with a set of ranks for a file's tests; with scope "function", a test may break the set."""

    @pytest.fixture(scope=scope)
    def ranks() -> Iterator[Ranks]:
        with make() as made:
            yield made

    return ranks


class RankFailure(AssertionError):
    """A rank raised, died or did not answer. The message contains the answers and outputs of the ranks."""


class Ranks:
    """`world` processes in one gloo group over loopback."""

    host = "deepspeed"  # which rank_worker.py sets up
    # The imports of every case. Sluice is not among them, because some cases test when it is imported.
    imports = ("torch", "deepspeed", "deepspeed.module_inject", "torch._dynamo", "torch.onnx", "known_processor")
    python_path = ""  # first in the PYTHONPATH of the ranks

    def __init__(self, world: int) -> None:
        _sets.add(self)
        self.world = world
        self._port = 0
        self._processes: list[Process] = []
        self._replies: list[Any] = []
        self._logs: list[Path] = []
        self._folder = tempfile.TemporaryDirectory(prefix="sluice-ranks-")

    # ---- for tests ----

    def run(self, target: str, deadline: float = DEADLINE_S, **arguments: Any) -> list[Any]:
        """Runs `module:function(**arguments)` on all ranks; returns the results by rank."""
        answers = self.try_run(target, deadline, **arguments)
        bad = {rank: answer["error"] for rank, answer in enumerate(answers) if "error" in answer}
        if bad:
            self.stop()
            raise RankFailure("\n".join(f"rank {rank}: {error['traceback']}" for rank, error in bad.items()))
        return [answer["result"] for answer in answers]

    def try_run(
        self,
        target: str,
        deadline: float = DEADLINE_S,
        dying: tuple[int, ...] = (),
        stopping: tuple[int, ...] = (),
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """Does the same as `run`, but a rank's exception is a result: {"error": {"type", "message", "traceback"}}.

        Ranks in `dying` must die in this call: their result is {"died": true}, and the set is unusable afterwards.
        Ranks in `stopping` must stop, and do not answer: {"stopped": whether the process is stopped then}.
        """
        if not self._processes:
            self._start()
        line = json.dumps({"target": target, "arguments": arguments}).encode() + b"\n"
        for process in self._processes:
            process.stdin.write(line)
            process.stdin.flush()
        return self._collect(target, deadline, dying, stopping)

    def output(self, rank: int) -> str:
        """Returns the output of this rank since its start."""
        return self._logs[rank].read_text(errors="replace")

    def process_id(self, rank: int) -> int:
        """Returns a rank's process id, for tests that stop or kill the rank."""
        return self._processes[rank].pid

    def groups(self) -> int:
        """Returns the largest number of process groups on a rank, from its number of gloo threads."""
        return max((_gloo_threads(process.pid) for process in self._processes), default=0)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the processes: first by closing their input, then by kill."""
        for process in self._processes:
            process.stdin.close()
        until = time.monotonic() + 3
        for process in self._processes:
            try:
                process.wait(max(0.01, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
        for reply in self._replies:
            reply.close()
        for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{self._port}_*"):  # left by DeepSpeed
            buffer.unlink(missing_ok=True)
        self._processes, self._replies = [], []

    # ---- inside ----

    def _start(self) -> None:
        environment = {
            **os.environ,
            "WORLD_SIZE": str(self.world),
            "LOCAL_SIZE": str(self.world),
            "MASTER_ADDR": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            "TORCHDYNAMO_DISABLE": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [self.python_path, os.environ.get("PYTHONPATH")])),
        }
        server = _server_for(self.imports, environment)
        self._logs = [Path(self._folder.name) / f"rank{rank}-{time.monotonic_ns()}.log" for rank in range(self.world)]
        with socket.create_server(("127.0.0.1", 0), backlog=128) as door:  # rank 0 gets it, so no other process can
            self._port = door.getsockname()[1]
            environment["MASTER_PORT"] = str(self._port)
            for rank in range(self.world):
                read_end, write_end = os.pipe()
                words = [write_end, door.fileno() if rank == 0 else "-1", self.host]
                own = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                with self._logs[rank].open("wb") as log:
                    started = server.start(WORKER, words, own, self._folder.name, log.fileno(), has_stdin=True)
                self._processes.append(started)
                os.close(write_end)
                self._replies.append(os.fdopen(read_end, "rb", buffering=0))
        for answer in self._collect("start", START_DEADLINE_S):
            if "error" in answer:
                self.stop()
                raise RankFailure(answer["error"]["traceback"])

    def _is_stopped(self, rank: int) -> bool:
        """Returns whether the kernel's state of the process, after the name in brackets, is "T"."""
        return Path(f"/proc/{self.process_id(rank)}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def _collect(
        self, what: str, deadline: float, dying: tuple[int, ...] = (), stopping: tuple[int, ...] = ()
    ) -> list[dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        pending = {rank: b"" for rank in range(self.world) if rank not in stopping}
        until = time.monotonic() + deadline
        with selectors.DefaultSelector() as selector:
            for rank in pending:
                selector.register(self._replies[rank], selectors.EVENT_READ, rank)
            while len(answers) < len(pending):
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    silent = sorted(set(pending) - set(answers))
                    self._fail(f"{what}: rank {silent} did not answer in {deadline:.0f} s", answers)
                for key, _ in ready:
                    rank = key.data
                    data = os.read(key.fd, 1 << 16)
                    pending[rank] += data
                    if pending[rank].endswith(b"\n"):
                        answers[rank] = json.loads(pending[rank])
                        selector.unregister(key.fileobj)
                    elif not data and rank in dying:
                        answers[rank] = {"died": True}
                        selector.unregister(key.fileobj)
                    elif not data:
                        self._fail(f"{what}: rank {rank} died", answers)
        for rank in stopping:
            answers[rank] = {"stopped": self._is_stopped(rank)}
        return [answers[rank] for rank in range(self.world)]

    def _fail(self, message: str, answers: dict[int, dict[str, Any]]) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)  # prints its stacks
        time.sleep(1)
        self.stop()
        tails = [f"--- rank {rank} printed\n{self.output(rank)[-8000:]}" for rank in range(self.world)]
        raise RankFailure("\n".join([message, f"answers: {answers}", *tails]))
