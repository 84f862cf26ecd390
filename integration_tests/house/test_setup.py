# SPDX-License-Identifier: Apache-2.0
"""Tests the calls and messages of the scripts in third_party/setup, with mock programs instead of the machine's."""

import shutil
import subprocess
from pathlib import Path

import pytest

SETUP = Path(__file__).resolve().parents[2] / "third_party" / "setup"
TOOLS = "bash cat cut date dirname env find flock grep ls mkdir rm sed sha256sum sleep tail touch tr wc".split()


class Machine:
    """Copies the scripts to a separate checkout, and makes a PATH with only the added programs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.calls = folder / "checkout", folder / "bin", folder / "calls"
        shutil.copytree(SETUP, self.root / "third_party" / "setup")
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.calls.write_text("")

    def program(self, path: Path, body: str) -> None:
        """Writes a program that records its name and arguments, then runs `body`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'#!/bin/bash\necho "{path.name} $*" >>"{self.calls}"\n{body}\n')
        path.chmod(0o755)

    def python(self, path: Path) -> None:
        """Writes a mock Python for the scripts; virtual environments get the same."""
        self.program(path, '[ "$1" != -V ] || echo "Python 3.11.0"')

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Runs setup.sh quickstart, or another of the scripts."""
        environment = {"PATH": str(self.bin), "HOME": str(self.root)}
        name, *arguments = command or ("setup.sh", "quickstart")
        command = ("bash", str(self.root / "third_party" / "setup" / name), *arguments)
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)

    def called(self, what: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith(what)]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.python(made.bin / "python3")
    made.program(made.bin / "apt-get", "")
    made.program(made.bin / "id", "echo 1000")
    (made.bin / "sleep").unlink()
    made.program(made.bin / "sleep", "exec /bin/sleep 0.2")  # the pause between two attempts
    return made


def test_Setup_PackageMissingWithoutRoot_OneLineSaysWhatToDo(machine: Machine) -> None:
    machine.program(machine.bin / "dpkg-query", "echo -n not-installed")
    done = machine.run()
    assert done.returncode == 1
    failed = [line for line in (done.stdout + done.stderr).splitlines() if "FAILED" in line]
    assert len(failed) == 1 and "ask an administrator for: apt-get install " in failed[0], done
    listed = (line.split("#")[0].strip() for line in (SETUP / "packages.quickstart.txt").read_text().splitlines())
    wanted = [name for name in listed if name]
    assert wanted and all(name in failed[0] for name in wanted)
    assert not machine.called("apt-get") and not (machine.root / ".venv").exists()


def test_Setup_AptGetThatInstallsNothing_IsNotBelieved(machine: Machine) -> None:
    machine.program(machine.bin / "dpkg-query", "echo -n not-installed")
    machine.program(machine.bin / "id", "echo 0")
    done = machine.run()
    assert done.returncode == 1 and "these are still missing" in done.stderr, done
    assert len(machine.called("apt-get")) == 2  # update, install


def test_Setup_SecondRun_InstallsNothing(machine: Machine) -> None:
    machine.program(machine.bin / "dpkg-query", "echo -n installed")
    machine.python(machine.root / ".venv" / "bin" / "python")
    extension = machine.root / ".venv" / "torch_extensions" / "deepspeed_shm_comm" / "op.so"
    extension.parent.mkdir(parents=True)
    extension.write_text("")
    first = machine.run()
    assert first.returncode == 0 and "setup: ready (quickstart" in first.stdout, first
    installs = [line for line in machine.called("python") if " pip " in line]
    assert len(installs) == 2, installs  # torch, then everything else
    second = machine.run()
    assert second.returncode == 0, second
    assert [line for line in machine.called("python") if " pip " in line] == installs
    requirements = machine.root / "third_party" / "setup" / "requirements.txt"
    requirements.write_text(requirements.read_text() + "# another\n")
    assert machine.run().returncode == 0
    assert len([line for line in machine.called("python") if " pip " in line]) == 4  # another list is installed
    assert not machine.called("apt-get")


def test_Setup_PipFails_OneLineSaysWhatToDo(machine: Machine) -> None:
    machine.program(machine.bin / "dpkg-query", "echo -n installed")
    machine.program(
        machine.root / ".venv" / "bin" / "python",
        '[ "$1" != -V ] || echo "Python 3.11.0"\n[ "$2" != pip ] || { echo "ERROR: no space left"; exit 7; }',
    )
    done = machine.run()
    failed = [line for line in (done.stdout + done.stderr).splitlines() if "FAILED" in line]
    assert done.returncode == 1 and len(failed) == 1, done
    assert "exit 7" in failed[0] and "check the network" in failed[0] and ".setup.log" in failed[0]
    assert "setup: | ERROR: no space left" in done.stdout  # CI only shows what the script prints, not the log
    assert len([line for line in machine.called("python") if " pip " in line]) == 3


def test_Setup_PipFailsOnce_IsTriedAgainWithoutItsCache(machine: Machine) -> None:
    machine.program(machine.bin / "dpkg-query", "echo -n installed")
    machine.program(
        machine.root / ".venv" / "bin" / "python",
        '[ "$1" != -V ] || echo "Python 3.11.0"\n'
        f'[ "$2" != pip ] || [ -n "$PIP_NO_CACHE_DIR" ] || exit 7\necho "op" >{machine.root}/op',
    )
    done = machine.run()
    assert done.returncode == 0 and "setup: ready (quickstart" in done.stdout, done
    assert len([line for line in machine.called("python") if " pip " in line]) == 4  # each of the two lists twice


def test_Environment_SourcedByHand_FindsItsCheckout(tmp_path: Path) -> None:
    """Otherwise DeepSpeed's operators would be built in the root folder by every process of a shell that sourced it."""
    source = f". {SETUP}/env.sh; echo $TORCH_EXTENSIONS_DIR"
    done = subprocess.run(
        ["bash", "-c", source], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout.strip() == str(SETUP.parents[1] / ".venv" / "torch_extensions"), done
