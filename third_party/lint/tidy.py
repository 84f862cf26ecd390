# SPDX-License-Identifier: Apache-2.0
"""Runs clang-tidy 14 over the library's C files with the flags that Bazel compiles them with.

    tidy.py [--analyze] [PREFIX...]

Without --analyze the path-sensitive checks (clang-analyzer-*) are left out: they take seconds per file, the others a
tenth of a second. A clean file is checked again only if it, a header, its flags or .clang-tidy change; results are
cached in .test/tidy.
"""

import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys

QUERY = 'mnemonic("CppCompile", //backend/... + //capi/...)'
GENERATED = ("@mpi//:all",)
KEPT = ("-D", "-std=", "-m")  # flags that change the meaning of the source; clang may not have gcc's other flags
PAIRS = ("-iquote", "-isystem", "-I", "-include")


def commands():
    """Returns {source: flags} of the library's own C files."""
    # Generated headers of external libraries exist only after a build.
    subprocess.run(["bazel", "build", "--noshow_progress", *GENERATED], capture_output=True, check=True)
    query = ["bazel", "aquery", "--noshow_progress", "--keep_going", "--output=jsonproto", QUERY]
    done = subprocess.run(query, capture_output=True, text=True)
    if not done.stdout.strip():
        sys.exit("bazel aquery failed:\n" + done.stderr[-2000:])
    # Paths of generated and external headers are relative to Bazel's execution root.
    told = subprocess.run(["bazel", "info", "execution_root"], capture_output=True, text=True, check=True)
    root = told.stdout.strip()
    found = {}
    for action in json.loads(done.stdout).get("actions", ()):
        arguments = action["arguments"]
        source = arguments[arguments.index("-c") + 1]
        is_ours = source.startswith(("backend/", "capi/")) and source.endswith(".c")
        if not is_ours or "/test/" in source or "/cts/" in source:
            continue
        flags = []
        for position, argument in enumerate(arguments):
            if argument in PAIRS:
                value = arguments[position + 1]
                flags += [
                    argument,
                    os.path.join(root, value) if value.startswith(("bazel-out/", "external/")) else value,
                ]
            elif argument.startswith(KEPT) and "redacted" not in argument:
                flags.append(argument)
        found[source] = flags
    return found


def digest_of(paths):
    digest = hashlib.sha256()
    for path in sorted(paths):
        with open(path, "rb") as file:
            digest.update(path.encode() + b"\0" + file.read())
    return digest.hexdigest()


def headers():
    for top in ("backend", "capi"):
        for where, _, names in os.walk(top):
            yield from (os.path.join(where, name) for name in names if name.endswith((".h", ".inc")))


def check(source, flags, checks):
    command = ["nice", "clang-tidy-14", "--quiet", f"--checks={checks}", source, "--", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    # clang-tidy's own errors (a missing header) are reported like findings.
    return source, done.returncode, done.stdout + ("" if done.stdout else done.stderr)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--analyze"]
    checks = "" if "--analyze" in sys.argv else "-clang-analyzer-*"  # added to those of .clang-tidy
    wanted = commands()
    if arguments:
        prefixes = tuple(argument.rstrip("/") for argument in arguments)
        inside = lambda source: any(source == p or source.startswith(p + "/") for p in prefixes)  # noqa: E731
        wanted = {source: flags for source, flags in wanted.items() if inside(source)}
    cache = os.path.join(".test", "tidy")
    os.makedirs(cache, exist_ok=True)
    common = digest_of([".clang-tidy", *headers()])
    stamps = {}
    for source, flags in wanted.items():
        key = hashlib.sha256(f"{common}{digest_of([source])}{flags}{checks}".encode()).hexdigest()
        stamps[source] = os.path.join(cache, key)
    todo = [source for source in sorted(wanted) if not os.path.exists(stamps[source])]
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for source, code, text in pool.map(lambda source: check(source, wanted[source], checks), todo):
            if code == 0:
                open(stamps[source], "w").close()
            else:
                # The findings without the paths that led there; clang-tidy-14 itself shows those.
                lines = [line for line in text.splitlines() if " error: " in line or " warning: " in line]
                print("\n".join(lines or text.splitlines()).replace(os.getcwd() + "/", ""))
                bad += 1
    print(f"clang-tidy: {len(todo)} of {len(wanted)} files looked at, {bad} with findings")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
