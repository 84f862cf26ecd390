#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the digests of this tree, with uncommitted changes, and of a commit: do all layers have the same bits?

  capi/test/digest/compare.py BASE [--jobs N]      N processes at a time (default: cores)

Exit 0: equal; 1: digests differ; 2: something could not be run. README.md says what to do with a difference.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).absolute().parent
ROOT = HERE.parents[2]
FOLDER = "capi/test/digest"
TARGET = f"//{FOLDER}:digest_test"
SHOWN = 40
PARTS = 24


class Trouble(Exception):
    """Something could not be run; the message says what and where."""


def run(*command, cwd, code=(0,)):
    done = subprocess.run(["nice", *map(str, command)], cwd=cwd, capture_output=True, text=True)
    if done.returncode not in code:
        raise Trouble(f"{' '.join(map(str, command))} in {cwd} ends with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def digests(root, jobs):
    """Builds the program of a tree, and returns its lines by their first word."""
    run("bazel", "build", "--noshow_progress", TARGET, cwd=root)
    program = pathlib.Path(run("bazel", "info", "bazel-bin", cwd=root).splitlines()[-1]) / FOLDER / "digest_test"
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        texts = pool.map(lambda part: run(program, part, PARTS, cwd=root, code=(0, 1)), range(PARTS))
        return dict(line.split(" ", 1) for line in "".join(texts).splitlines())


def check_out(base, folder):
    """Makes a worktree of the base with this tree's program."""
    leave(folder)
    run("git", "worktree", "add", "--detach", folder, base, cwd=ROOT)
    shutil.copytree(HERE, folder / FOLDER, dirs_exist_ok=True)
    if (ROOT / ".bazelrc.user").exists():  # settings of this machine, never committed
        shutil.copy(ROOT / ".bazelrc.user", folder)


def leave(folder):
    """Removes the worktree, also one that an interrupted run has left."""
    shutil.rmtree(folder, ignore_errors=True)
    run("git", "worktree", "prune", cwd=ROOT)


def differences(before, after):
    """Returns lines that say which fields of which layers differ."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        old, new = (
            dict(pair.partition("=")[::2] for pair in side.get(name, "absent").split()) for side in (before, after)
        )
        fields = [field for field in {**old, **new} if old.get(field) != new.get(field)]
        if fields:
            found.append(f"{name}: " + ", ".join(f"{field} {old.get(field)} -> {new.get(field)}" for field in fields))
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    options = parser.parse_args()
    folder = ROOT / ".test" / "digest_base"  # always the same folder, so that Bazel builds only changes
    try:
        check_out(options.base, folder)
        before = digests(folder, options.jobs)
        run("bazel", "shutdown", cwd=folder)
        after = digests(ROOT, options.jobs)
    except Trouble as trouble:
        print(f"compare.py: {trouble}", file=sys.stderr)
        return 2
    finally:
        leave(folder)
    found = differences(before, after)
    print(*found[:SHOWN], sep="\n", end="\n" * bool(found))
    print(f"{len(after) - len(found)} digests are equal, {len(found)} differ: {options.base} and this tree")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
