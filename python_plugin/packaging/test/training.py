# SPDX-License-Identifier: Apache-2.0
"""Runs training_step.py in a Python with torch, against an unpacked wheel, where no compiler is found."""

import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def run(python, wheel, folder):
    """Runs it, and returns its output: Python, torch, adapter, sluice."""
    unpacked = folder / "unpacked"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command += ["--no-index", "--no-compile", "--target", str(unpacked), str(wheel)]
    subprocess.run(command, check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment.update(PYTHONPATH=str(unpacked), CXX="no-such-compiler", SLUICE_CACHE_DIR=str(folder / "cache"))
    command = [python, os.path.join(HERE, "training_step.py"), str(folder / "store")]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
