#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares digests of the listed calls: of this tree and a base commit, or of the calls of each family.

  compare.py BASE       builds this tree and the base commit (in its own worktree), runs both, shows differences
  compare.py            this tree only: do the calls of a family agree to the bit?
  --only TEXT           calls whose line contains TEXT;  --jobs N  calls at a time (default: cores)
  --digest FILE --fakes FILE    existing builds (the Bazel test): nothing is built

Exit 0: equal; 1: digests differ from the base, or within a family; 2: something could not be run. README.md describes
the comparison, and what to do with a difference.
"""

import argparse
import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).absolute().parent
sys.path.insert(0, str(HERE))
import calls as listed  # noqa: E402

FOLDER = "integration_tests/digest"
PROGRAM = f"//{FOLDER}:digest"
FAKES = f"//{FOLDER}:libfake_gpu.so"
# The file names of the vendor's libraries on a CUDA host.
VENDOR = ("libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libnccl.so.2")
# Results on which all calls of a family agree: n, cut, policies, plans and repetition do not change them.
PROMISED = ("out", "dx", "dw")
NO_KERNELS = "has no CUDA kernels"  # a part of the refusal's message
SHOWN = 40
SECONDS = 240  # of one call


class Trouble(Exception):
    """Something could not be run; the message says what and where."""


def parse(line):
    """Returns the fields of a line, which may begin with a call's id."""
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def read_calls(only=""):
    """Returns the listed calls by id."""
    found = {name: call for name, call in listed.calls().items() if only in listed.line(call)}
    if not found:
        raise Trouble(f"no call of calls.py holds {only!r}")
    return found


def read_digests(text):
    """Returns the lines of the program by their first word."""
    return dict(line.split(" ", 1) for line in text.splitlines() if line.strip() and not line.startswith("#"))


# ---- building and running ------------------------------------------------------------------------------------------


def _bazel(root, *arguments):
    done = subprocess.run(["nice", "bazel", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise Trouble(f"bazel {' '.join(arguments)} in {root} failed:\n{done.stderr[-3000:]}")
    return done.stdout.strip()


def build(root):
    """Builds the program and the fakes of a tree, and returns their paths below its bazel-bin."""
    _bazel(root, "build", "--noshow_progress", PROGRAM, FAKES)
    found = pathlib.Path(_bazel(root, "info", "bazel-bin").splitlines()[-1]) / FOLDER
    return found / "digest", found / "libfake_gpu.so"


def leave(root, folder):
    """Removes the worktree, also one that an interrupted run has left."""
    subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=root, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "worktree", "prune"], cwd=root, capture_output=True)


def check_out(base, root, folder):
    """Makes a worktree of the base with this tree's program and list. caller.c, which alone uses the ABI, and the BUILD
    file are the base's own, if it has them."""
    leave(root, folder)
    done = subprocess.run(
        ["git", "worktree", "add", "--detach", folder, base], cwd=root, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Trouble(f"git worktree add of {base} failed: {done.stderr.strip()}")
    theirs = pathlib.Path(folder) / FOLDER
    is_there = (theirs / "BUILD").exists()
    theirs.mkdir(parents=True, exist_ok=True)
    for path in theirs.glob("*.[ch]"):
        if not (HERE / path.name).exists():
            path.unlink()
    for path in [*HERE.glob("*.[ch]"), HERE / "calls.py", HERE / "BUILD"]:
        if not (is_there and path.name in ("BUILD", "caller.c")):
            shutil.copy(path, theirs / path.name)
    if "listed.h" not in (theirs / "BUILD").read_text():
        (theirs / "listed.h").write_text(listed.table())
    settings = pathlib.Path(root) / ".bazelrc.user"  # of this machine, never committed
    if settings.exists():
        shutil.copy(settings, folder)


def _environment(fakes, folder):
    for name in VENDOR:
        (folder / name).symlink_to(pathlib.Path(fakes).resolve())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "OMP_"))}
    # Idle threads sleep, as ranks share the cores.
    return {**kept, "LD_LIBRARY_PATH": str(folder), "OMP_WAIT_POLICY": "passive"}


def run(program, fakes, calls, options, each_rank=False):
    """Runs each call in its own process, and returns the lines."""
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(fakes, pathlib.Path(folder))

        def one(name):
            command = [str(program), *["--each-rank"] * each_rank, name]
            try:
                done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
            except subprocess.TimeoutExpired:
                return f"{name} ended: no answer in {SECONDS} s\n"
            return done.stdout if done.returncode == 0 else f"{name} ended: {done.returncode} {done.stderr[-200:]!r}\n"

        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            return read_digests("".join(pool.map(one, calls)))


# ---- comparing -----------------------------------------------------------------------------------------------------


def differences(before, after):
    """Returns lines that say which fields of which calls differ."""
    found = []
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) == after.get(name):
            continue
        old, new = parse(before.get(name, "")), parse(after.get(name, ""))
        if not old or not new:
            found.append(f"{name}: {before.get(name, 'absent')[:200]} -> {after.get(name, 'absent')[:200]}")
            continue
        fields = [field for field in {**old, **new} if old.get(field) != new.get(field)]
        found.append(f"{name}: " + ", ".join(f"{field} {old.get(field)} -> {new.get(field)}" for field in fields))
    return found


def _is_written(call, field):
    frozen = call.get("frozen", "").split(",")
    if field == "out":
        return True
    return "eval" not in call and ("x" if field == "dx" else "routes") not in frozen


def broken_promises(calls, digests):
    """Returns calls of one family whose outputs or input gradients differ, and calls that did not run."""
    found, first = [], {}
    for name, call in calls.items():
        values = parse(digests[name])
        if "out" not in values:
            found.append(f"{name} did not run: {digests[name]}")
            continue
        for field in PROMISED:
            if not _is_written(call, field):
                continue
            other, value = first.setdefault((call["family"], field), (name, values[field]))
            if value != values[field]:
                found.append(f"{name} and {other} of family {call['family']} differ in {field}")
    return found


def show(title, found):
    if found:
        print(f"{title}: {len(found)}")
        print("\n".join(f"  {line}" for line in found[:SHOWN]))
        if len(found) > SHOWN:
            print(f"  ... and {len(found) - SHOWN} more")
    return bool(found)


def with_base(base, options):
    root, calls = HERE.parents[1], read_calls(options.only)
    folder = os.path.join(root, ".test", "digest_base")  # always the same folder, so that Bazel builds only changes
    try:
        check_out(base, root, folder)
        before = run(*build(folder), calls, options, each_rank=True)
        subprocess.run(["bazel", "shutdown"], cwd=folder, capture_output=True)
    finally:
        leave(root, folder)
    after = run(*build(root), calls, options, each_rank=True)
    found = differences(before, after)
    if not show(f"calls and ranks that differ from {base}", found):
        print(f"equal: {len(after)} digests of calls and ranks, {base} and this tree")
    return 1 if found else 0


def able(calls, digests):
    """Returns the calls that can run here, and prints how many are left out, and why."""
    kept = {name: call for name, call in calls.items() if NO_KERNELS not in digests[name]}
    if len(kept) < len(calls):
        print(f"SKIPPED: {len(calls) - len(kept)} of {len(calls)} calls: libsluice was built without nvcc")
    if "TSAN_OPTIONS" in os.environ:
        print("SKIPPED: calls with several threads: barriers of OpenMP look like races to the thread sanitizer")
        kept = {name: call for name, call in kept.items() if "threads" not in call}
    return kept


def alone(options):
    program, fakes = (options.digest, options.fakes) if options.digest else build(HERE.parents[1])
    calls = read_calls(options.only)
    digests = run(program, fakes, calls, options)
    calls = able(calls, digests)
    failed = show("calls that did not run, or break a promise", broken_promises(calls, digests))
    if not failed:
        print(f"{len(calls)} calls of {len({call['family'] for call in calls.values()})} families agree")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a commit; without one this tree alone")
    parser.add_argument("--only", default="", help="calls whose line holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="calls at a time")
    parser.add_argument("--digest", help="the program, built already")
    parser.add_argument("--fakes", help="the fake libraries, built already")
    options = parser.parse_args()
    if bool(options.digest) != bool(options.fakes) or (options.base and options.digest):
        parser.error("--digest goes with --fakes, and with no base")
    try:
        return with_base(options.base, options) if options.base else alone(options)
    except Trouble as trouble:
        print(f"compare.py: {trouble}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
