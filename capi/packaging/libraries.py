# SPDX-License-Identifier: Apache-2.0
"""Builds and strips the shipped libraries, for the archive, the Debian packages and the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
INCLUDE = os.path.join(ROOT, "capi", "include")
LIBRARY = "//capi:libsluice.so.0"
OPENED_ON_DEMAND = ("//backend/comm/mpi:libsluice_mpi.so",)
DRY_STEP = "//capi/dry_step:sluice-dry-step"  # the program of `sluice simulate --device`, which only the wheel contains


class Failure(Exception):
    """An error for the user; its message is one line that names what failed and what to do."""


def run(*command: str) -> str:
    """Runs a command and returns its output, in English whatever the user's locale."""
    environment = dict(os.environ, LC_ALL="C")
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True)
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-6000:])
        raise Failure(f"{' '.join(command[:4])} failed (exit {done.returncode}): see above")
    return done.stdout


def build(*more: str) -> list[str]:
    """Builds the libraries and other targets as they are tested, optimised and with debug information; returns their
    paths."""
    targets = (LIBRARY, *OPENED_ON_DEMAND, *more)
    # Bazel continues an interrupted build. It prints its progress to stderr every few seconds.
    quiet = ("--curses=no", "--show_progress_rate_limit=15", "--show_result=0", "--ui_event_filters=-info")
    done = subprocess.run(("nice", "bazel", "build", *quiet, *targets), cwd=ROOT, stdout=subprocess.DEVNULL)
    if done.returncode != 0:
        raise Failure(f"bazel build failed (exit {done.returncode}): see above")
    bin_dir = run("bazel", "info", "bazel-bin").strip()
    return [os.path.join(bin_dir, target[2:].replace(":", "/")) for target in targets]


def strip(path: str, stripped: str, debug: str | None = None) -> None:
    """Copies a library without its debug information, and writes that to `debug`, next to which debuggers look."""
    os.makedirs(os.path.dirname(stripped), exist_ok=True)
    run("objcopy", "--strip-unneeded", path, stripped)
    if debug is not None:
        run("objcopy", "--only-keep-debug", path, debug)
        run("objcopy", f"--add-gnu-debuglink={debug}", stripped)
        os.chmod(debug, 0o644)
    os.chmod(stripped, 0o644)


def version() -> str:
    """Returns the version that the public headers define."""
    with open(os.path.join(INCLUDE, "sluice", "base.h")) as file:
        text = file.read()
    parts = (re.search(rf"^#define SLUICE_VERSION_{part} (\d+)$", text, re.MULTILINE) for part in PARTS)
    return ".".join(found.group(1) for found in parts)


PARTS = ("MAJOR", "MINOR", "PATCH")
