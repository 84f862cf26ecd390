#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes compile_commands.json for editors and clangd: how Bazel compiles each C and C++ file.

    .venv/bin/python third_party/bazel/compile_commands.py [TARGETS, by default //...]

Nothing is compiled. Generated headers exist after `bazel build //...`.
"""

import json
import os
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCES = (".c", ".cc", ".cpp")


def bazel(*arguments: str) -> str:
    return subprocess.run(["bazel", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def without_dependency_file(arguments: list[str]) -> list[str]:
    """Removes the options for a dependency file, whose folder may not exist."""
    at = arguments.index("-MF") if "-MF" in arguments else len(arguments)
    return [argument for argument in arguments[:at] + arguments[at + 2 :] if argument != "-MD"]


def commands(actions: list[dict]) -> list[dict]:
    """Returns one entry for each source, of the first action that compiles it."""
    entries: dict[str, dict] = {}
    for action in actions:
        arguments = without_dependency_file(action["arguments"])
        for source in (argument for argument in arguments if argument.endswith(SOURCES)):
            entries.setdefault(source, {"directory": ROOT, "file": source, "arguments": arguments})
    return sorted(entries.values(), key=lambda entry: entry["file"])


def main() -> None:
    targets = " + ".join(sys.argv[1:] or ["//..."])
    found = bazel("aquery", "--output=jsonproto", "--noshow_progress", f'mnemonic("CppCompile", {targets})')
    listed = commands(json.loads(found)["actions"])
    with open(os.path.join(ROOT, "compile_commands.json"), "w", encoding="utf-8") as file:
        json.dump(listed, file, indent=1)
    print(f"compile_commands.json: {len(listed)} files")


if __name__ == "__main__":
    main()
