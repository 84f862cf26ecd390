# SPDX-License-Identifier: Apache-2.0
"""Runs one function in several processes that form a gloo group over loopback, with a deadline.

A job is a function at the top of a module, or "module:function" of this folder. It is called with its keyword
arguments and returns something that pickles. Ranks are forks of a process that has imported torch in the environment of
the job.
"""

import atexit
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from datetime import timedelta

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.append(os.path.join(HERE, "..", "..", "..", "third_party", "test"))
from fork_server import ForkServer  # noqa: E402

# Imports of every job: torch itself, the imports of its first backward and its checkpoints, and the adapter.
IMPORTS = [
    *("pytest", "torch", "torch.distributed", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"),
    "sluice.adapters.torch",
]

_servers = []


def _fork_server(environment):
    """Returns the fork server of this environment, which is started when a test first needs it."""
    found = next((each for each in _servers if not each.differs_in(environment)), None)
    if found is None:
        _servers.append(found := ForkServer(IMPORTS, environment))
    return found


class Ended:
    """The end of one rank: `result`, or `error` (its traceback), or neither if it died; `code` is its exit status."""

    def __init__(self, path, code, output):
        self.code = code
        self.output = output
        self.result = None
        self.error = "it ended before its job did" if code == 0 else None
        if os.path.exists(path):
            with open(path, "rb") as file:
                good, value = pickle.load(file)
            self.result, self.error = (value, None) if good else (None, value)

    def told(self, rank):
        return f"rank {rank} ended with {self.code}\n{self.error or ''}\n{self.output[-6000:]}"


class Started:
    """Running ranks, and the folder of their results and logs, which is removed when they have ended or are
    unreferenced."""

    def __init__(self, deadline):
        self.until = time.monotonic() + deadline
        self.processes = []
        self._folder = tempfile.TemporaryDirectory(prefix="sluice_ranks_")
        self.folder = self._folder.name

    def abandon(self):
        """Kills the ranks that still run, and removes the folder."""
        for process in self.processes:
            process.kill()
            process.wait()
        self._folder.cleanup()


def start(world, job, deadline=300, group_timeout=60, extra_environment=None, finalize=False, **arguments):
    """Starts the ranks and returns what `finish` takes. finalize: the interpreter also ends as usual after the exit
    handlers, which takes a rank a third of a second."""
    started = Started(deadline)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    environment.update({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world), **(extra_environment or {})})
    if callable(job):
        job = f"{os.path.splitext(job.__code__.co_filename)[0]}:{job.__name__}"
    with open(os.path.join(started.folder, "job"), "wb") as file:
        pickle.dump((job, group_timeout, finalize, arguments), file)
    try:
        server = _fork_server(environment)
        with socket.create_server(("127.0.0.1", 0), backlog=128) as door:
            environment["MASTER_PORT"] = str(door.getsockname()[1])
            for rank in range(world):
                # Rank 0 inherits the socket, so that no other process gets the port.
                words = [started.folder, "-1" if rank > 0 else door.fileno()]
                with open(os.path.join(started.folder, f"log{rank}"), "wb") as log:
                    own = dict(environment, RANK=str(rank))
                    started.processes.append(server.start(os.path.abspath(__file__), words, own, HERE, log.fileno()))
    except BaseException:
        started.abandon()
        raise
    return started


def finish(started):
    """Waits for all ranks. Ranks that exceed the deadline print their stacks and are killed. Prints the logs of ranks
    that failed, since their folder is removed."""
    try:
        ended, late = _wait(started)
    finally:
        started.abandon()
    for rank, end in enumerate(ended):
        if end.code != 0 or end.error is not None:
            print(f"--- {end.told(rank)}")
    assert not late, f"ranks {late} missed the deadline:\n" + "\n".join(ended[rank].told(rank) for rank in late)
    return ended


def _wait(started):
    processes, late = started.processes, []
    for rank, process in enumerate(processes):
        try:
            process.wait(max(0.1, started.until - time.monotonic()))
        except subprocess.TimeoutExpired:
            late.append(rank)
    for rank in late:
        processes[rank].send_signal(signal.SIGABRT)  # faulthandler prints the stacks
    ended = []
    for rank, process in enumerate(processes):
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with open(os.path.join(started.folder, f"log{rank}"), errors="replace") as log:
            ended.append(Ended(os.path.join(started.folder, f"result{rank}"), process.returncode, log.read()))
    return ended, late


def run(world, job, **options):
    """Returns the results of all ranks, all of which must succeed."""
    ended = finish(start(world, job, **options))
    for rank, end in enumerate(ended):
        assert end.code == 0 and end.error is None, end.told(rank)
    return [end.result for end in ended]


def _main():
    import faulthandler

    faulthandler.enable()
    folder, door = sys.argv[1], int(sys.argv[2])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with open(os.path.join(folder, "job"), "rb") as file:
        job, group_timeout, finalize, arguments = pickle.load(file)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world
    listening = {"is_master": True, "master_listen_fd": door} if rank == 0 else {}
    # Starting may take any time; afterwards the deadline of the test applies.
    store = dist.TCPStore(*place, timeout=timedelta(seconds=180), wait_for_workers=False, **listening)
    store.set_timeout(timedelta(seconds=180))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=group_timeout))
    module, function = job.split(":")
    folder_of_module, module = os.path.split(module)
    sys.path.insert(0, folder_of_module or HERE)
    try:
        value = (True, getattr(importlib.import_module(module), function)(**arguments))
    except BaseException:
        value = (False, traceback.format_exc())
    path = os.path.join(folder, f"result{rank}")
    with open(path + ".part", "wb") as file:
        pickle.dump(value, file)
    os.replace(path + ".part", path)
    if not finalize:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    _main()
