# SPDX-License-Identifier: Apache-2.0
"""Starts two ranks of a script, or of a module, as torchrun does: `two_ranks.py [-m] NAME ARGUMENTS...`.

They are forks of a process that has imported torch, which takes longer than what the ranks do.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path


def launcher() -> list[str]:
    """Returns the command before a script and its arguments."""
    return [sys.executable, str(Path(__file__).resolve())]


def torchrun(folder: Path) -> list[str]:
    """Returns the same for torch's own launcher; its logs go below `folder`, since those in /tmp would stay there."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*words, "--log-dir", str(folder / "elastic")]


def output_of(folder: Path, *words: str, **environment: str) -> str:
    """Runs a command of ranks in this folder, and returns its output. It must succeed."""
    own = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", **environment}
    done = subprocess.run(words, env=own, cwd=folder, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _run(rank: int, port: int, words: list[str]) -> None:
    """Runs the last part of torch's import in a rank, and then the script."""
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="0")
    torch._import_device_backends()  # Sluice's entry point
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str(Path(words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def _main() -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the ranks load it
    import torch.distributed as dist

    del os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]
    ports, ranks = [os.pipe() for _ in range(2)], []
    for rank, (reading, writing) in enumerate(ports):
        pid = os.fork()
        if pid == 0:
            os.close(writing)
            _run(rank, int(os.read(reading, 8)), sys.argv[1:])
            return
        ranks.append(pid)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # its threads start after the forks
    for _, writing in ports:
        os.write(writing, str(store.port).encode())
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(max(codes, key=abs))


if __name__ == "__main__":
    _main()
