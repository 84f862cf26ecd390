#!/usr/bin/env python3
"""Compares digests of the listed calls: this tree with a base commit, or with the values that are committed.

  compare.py BASE       builds this tree and the base commit (in a worktree of its own), runs both, shows differences
  compare.py            this tree beside the committed values of this machine's fingerprint, and with itself
  compare.py --record   writes the values anew: those that no machine changes, and those of this one's fingerprint
  --only TEXT             calls whose line holds TEXT;  --jobs N  so many at a time (default: cores)
  --digest FILE --fakes FILE    built already (the Bazel test): nothing is built

Exit 0: equal; 1: they differ, or calls do not hold among themselves what they promise; 2: something could not be run.
README.md says what is compared, and what to do with a difference.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).absolute().parent
FOLDER = "integration_tests/digest"
PROGRAM = f"//{FOLDER}:digest"
FAKES = f"//{FOLDER}:libfake_gpu.so"
# The names under which a CUDA host finds its vendor's libraries.
VENDOR = ("libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libnccl.so.2")
# Activations that f64 and the fake device compute with this machine's expf, exp and erfc; relu and identity take none.
LIBM = ("gelu", "gelu_tanh", "silu", "swiglu")
# Results on which all calls of a family agree: n, cut, policies, plans and repetition do not change them.
PROMISED = ("out", "dx", "dw")
NO_KERNELS = "has no CUDA kernels"  # in the refusal
SHOWN = 40


class Trouble(Exception):
    """Something could not be run: what and where."""


def parse(line):
    """The fields of a line that begins with them, or with a call's id."""
    return dict(pair.split("=", 1) for pair in line.split() if "=" in pair)


def read_calls(only=""):
    """The listed calls by id."""
    lines = (HERE / "calls.txt").read_text().splitlines()
    calls = [parse(line) for line in lines if line.strip() and not line.startswith("#") and only in line]
    if not calls:
        raise Trouble(f"no call of {HERE / 'calls.txt'} holds {only!r}")
    found = {call["id"]: call for call in calls}
    if len(found) != len(calls):
        raise Trouble(f"{HERE / 'calls.txt'} holds {len(calls)} calls under {len(found)} ids: give each one of its own")
    return found


def read_digests(text):
    """Lines of the program by their first word."""
    return dict(line.split(" ", 1) for line in text.splitlines() if line.strip() and not line.startswith("#"))


# ---- building and running ------------------------------------------------------------------------------------------


def _bazel(root, *arguments):
    done = subprocess.run(["nice", "bazel", *arguments], cwd=root, capture_output=True, text=True)
    if done.returncode != 0:
        raise Trouble(f"bazel {' '.join(arguments)} in {root} failed:\n{done.stderr[-3000:]}")
    return done.stdout.strip()


def build(root):
    """Paths of the program and the fakes of a tree, below its bazel-bin."""
    _bazel(root, "build", "--noshow_progress", PROGRAM, FAKES)
    found = pathlib.Path(_bazel(root, "info", "bazel-bin").splitlines()[-1]) / FOLDER
    return found / "digest", found / "libfake_gpu.so"


def leave(root, folder):
    """Takes the worktree away, also what an earlier run that was ended left of one."""
    subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=root, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run(["git", "worktree", "prune"], cwd=root, capture_output=True)


def check_out(base, root, folder):
    """A worktree of the base with this tree's list and program. What is built, and so the caller, says the base's BUILD
    file, where it has one."""
    leave(root, folder)
    done = subprocess.run(
        ["git", "worktree", "add", "--detach", folder, base], cwd=root, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise Trouble(f"git worktree add of {base} failed: {done.stderr.strip()}")
    theirs = pathlib.Path(folder) / FOLDER
    is_there = (theirs / "BUILD").exists()
    theirs.mkdir(parents=True, exist_ok=True)
    for path in HERE.iterdir():
        if path.is_file() and not (is_there and path.name == "BUILD"):
            shutil.copy(path, theirs / path.name)
    settings = pathlib.Path(root) / ".bazelrc.user"  # of this machine, never committed
    if settings.exists():
        shutil.copy(settings, folder)


def _environment(fakes, folder):
    for name in VENDOR:
        (folder / name).symlink_to(pathlib.Path(fakes).resolve())
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLUICE_", "OMP_"))}
    # Threads that have no work sleep: ranks share the cores.
    return {**kept, "LD_LIBRARY_PATH": str(folder), "OMP_WAIT_POLICY": "passive"}


def run(program, fakes, options, each_rank=False):
    """The program's lines."""
    command = [str(program), "--jobs", str(options.jobs), "--only", options.only, str(HERE / "calls.txt")]
    with tempfile.TemporaryDirectory() as folder:
        environment = _environment(fakes, pathlib.Path(folder))
        done = subprocess.run(command + ["--each-rank"] * each_rank, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise Trouble(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return read_digests(done.stdout)


def fingerprint(program):
    """What values depend on beside the library: the processor, and the functions of its C library."""
    return subprocess.run([str(program), "--fingerprint"], capture_output=True, text=True, check=True).stdout.strip()


# ---- comparing -----------------------------------------------------------------------------------------------------


def differences(before, after):
    """Lines that say which fields of which calls differ."""
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


def _takes_libm(call):
    on_device = call.get("device") == "cuda" or call.get("dtype") == "f64"
    return on_device and "callback" not in call and call.get("activation", "gelu") in LIBM


def _is_written(call, field):
    frozen = call.get("frozen", "").split(",")
    if field == "out":
        return True
    return "eval" not in call and ("x" if field == "dx" else "routes") not in frozen


def broken_promises(calls, digests):
    """Calls of one family whose outputs or input gradients differ, and calls that did not run."""
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
    root = HERE.parents[1]
    folder = os.path.join(root, ".test", "digest_base")  # always there, so that Bazel builds what has changed
    try:
        check_out(base, root, folder)
        before = run(*build(folder), options, each_rank=True)
        subprocess.run(["bazel", "shutdown"], cwd=folder, capture_output=True)
    finally:
        leave(root, folder)
    after = run(*build(root), options, each_rank=True)
    found = differences(before, after)
    if not show(f"calls and ranks that differ from {base}", found):
        print(f"equal: {len(after)} digests of calls and ranks, {base} and this tree")
    return 1 if found else 0


def values_files(mark):
    """Where values lie: of calls that take this machine's mathematical functions (True), and of all others."""
    folder = HERE / "values"
    return {False: folder / f"{mark.split('-')[0]}.txt", True: folder / f"{mark}.txt"}


def record(calls, digests, files):
    for takes_libm, path in files.items():
        names = [name for name, call in calls.items() if _takes_libm(call) == takes_libm]
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{name} {digests[name]}\n" for name in names))
        print(f"recorded {len(names)} digests in {path}")


def beside_values(calls, digests, files, mark):
    """Whether digests differ from the committed ones; says aloud which have none here."""
    failed = False
    for takes_libm, path in files.items():
        found = {name: digests[name] for name, call in calls.items() if _takes_libm(call) == takes_libm}
        if path.exists():
            kept = {name: value for name, value in read_digests(path.read_text()).items() if name in found}
            failed |= show(f"calls that differ from values/{path.name}", differences(kept, found))
        elif found:
            print(f"SKIPPED: {len(found)} of {len(calls)} calls have no committed values for this machine ({mark}):")
            print("they were compared among themselves alone. integration_tests/digest/compare.py BASE compares them")
    return failed


def able(calls, digests):
    """The calls that can run here; says aloud how many are left out, and why."""
    kept = {name: call for name, call in calls.items() if NO_KERNELS not in digests[name]}
    if len(kept) < len(calls):
        print(f"SKIPPED: {len(calls) - len(kept)} of {len(calls)} calls: libsluice was built without nvcc")
    if "TSAN_OPTIONS" in os.environ:
        print("SKIPPED: calls with several threads: barriers of OpenMP look like races to the thread sanitizer")
        kept = {name: call for name, call in kept.items() if "threads" not in call}
    return kept


def with_values(options):
    program, fakes = (options.digest, options.fakes) if options.digest else build(HERE.parents[1])
    calls = read_calls(options.only)
    mark = fingerprint(program)
    if mark.startswith("plain"):
        print("SKIPPED: this processor has no AVX2 with fused multiply-add, which gemm native is fixed to")
        return 0
    digests = run(program, fakes, options)
    calls = able(calls, digests)
    failed = show("calls that did not run, or break a promise", broken_promises(calls, digests))
    files = values_files(mark)
    if options.record and not failed and len(calls) == len(digests):
        record(calls, digests, files)
    else:
        failed |= beside_values(calls, digests, files, mark)
    if not failed:
        print(f"{len(calls)} calls are as they should be")
    return 1 if failed else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", help="a commit; without one: the committed values")
    parser.add_argument("--record", action="store_true", help="write the values anew")
    parser.add_argument("--only", default="", help="calls whose line holds this text")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="calls at a time")
    parser.add_argument("--digest", help="the program, built already")
    parser.add_argument("--fakes", help="the fake libraries, built already")
    options = parser.parse_args()
    if bool(options.digest) != bool(options.fakes) or (options.base and (options.record or options.digest)):
        parser.error("--digest goes with --fakes; a base with neither of them, nor with --record")
    if options.record and options.only:
        parser.error("--record writes the values of all calls: not with --only")
    try:
        return with_base(options.base, options) if options.base else with_values(options)
    except Trouble as trouble:
        print(f"compare.py: {trouble}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
