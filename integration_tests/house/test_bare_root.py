# SPDX-License-Identifier: Apache-2.0
"""Tests third_party/test/bare_root.py in a root that has this machine's /usr instead of its own Debian."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "third_party" / "test"))
import bare_root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    for name in ("dev", "etc/apt", "proc", "sluice", "sys", "tmp", "usr"):
        (made / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (made / name).symlink_to(f"usr/{name}")
    return made


def run(root: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    """Runs commands; /usr replaces a folder of wheels, which is mounted at its own path."""
    command = [sys.executable, bare_root.__file__, "--root", str(root), *commands]
    environment = {**os.environ, "PIP_FIND_LINKS": "/usr"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes another root")
def test_Commands_OneAfterTheOther_OutcomesAreToldAndNothingStays(root: Path) -> None:
    sleeper = f"{os.getpid()}.5"  # a number that no other process waits for
    leaves = f"echo left >/tmp/first; sleep {sleeper} >/dev/null 2>&1 &"
    looks = f"exec 2>&1; cat /tmp/first; pgrep -xf 'sleep {sleeper}' | wc -l; ls /; exit 3"
    done = run(root, leaves, looks, "test $PWD = /sluice")
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "left" in lines and "1" in lines and ".outside" not in lines  # all share one root, and see nothing else
    assert lines[-1] == "bare root: 2 passed, 1 failed"
    assert sum("FAILED (exit 3)" in line for line in lines) == 1
    assert not any(str(root) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    assert subprocess.run(["pgrep", "-xf", f"sleep {sleeper}"], stdout=subprocess.DEVNULL).returncode == 1


def test_Settings_ThatNameFilesAndFolders_AreFoundInTheRoot(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("a<=1\n")
    settings = {
        "PIP_CONSTRAINT": str(constraints),
        "PIP_EXTRA_INDEX_URL": f"file://{tmp_path}/index/simple https://example.com{constraints}",
        "PIP_FIND_LINKS": str(tmp_path),
        "PIP_DEFAULT_TIMEOUT": "180",
    }
    found, folders = bare_root.bring(settings, str(tmp_path / "debian"))
    assert found == settings | {"PIP_CONSTRAINT": f"/outside{constraints}"}
    assert Path(f"{tmp_path}/debian/outside{constraints}").read_text() == "a<=1\n"
    assert folders == [str(tmp_path), str(tmp_path / "index")]
