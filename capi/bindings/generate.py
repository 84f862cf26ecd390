# SPDX-License-Identifier: Apache-2.0
"""Generates files from the headers of the C ABI: the record of the ABI, and bindings for other languages.

    .venv/bin/python capi/bindings/generate.py                  capi/abi/abi.txt: commit it with each change of the ABI
    .venv/bin/python capi/bindings/generate.py --since v0.1.0   fails if the ABI of that release is broken
    .venv/bin/python capi/bindings/generate.py --out FOLDER     cpp/sluice/sluice.hpp, fortran/, go/, rust/

The bindings are not committed: the archive, the Debian package and the build.sh of each example generate them.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
INCLUDE = os.path.join(ROOT, "capi", "include")
SCRIPT = os.path.join(ROOT, "capi", "abi", "sluice.lds")
sys.path.insert(0, HERE)
import abi_table  # noqa: E402
import in_cxx  # noqa: E402
import in_fortran  # noqa: E402
import in_go  # noqa: E402
import in_rust  # noqa: E402
import record  # noqa: E402

LANGUAGES = (in_cxx, in_fortran, in_go, in_rust)
GENERATED = "Written by capi/bindings/generate.py: do not edit."


def files(include_dir: str) -> dict[str, str]:
    """Returns the text of each file of bindings by its relative path."""
    table = abi_table.read(include_dir)
    made = {language.PATH: language.bindings(table, GENERATED) for language in LANGUAGES}
    made["go/go.mod"] = in_go.MODULE
    return made


def write(folder: str, include_dir: str = INCLUDE) -> list[str]:
    """Writes the bindings below the folder, and returns their relative paths."""
    made = files(include_dir)
    for path, text in made.items():
        full = os.path.join(folder, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w") as file:
            file.write(text)
    return sorted(made)


def check(path: str, text: str) -> None:
    """Exits with the differences if the file does not have this text."""
    with open(path) as file:
        before = file.read().splitlines()
    changes = list(difflib.unified_diff(before, text.splitlines(), record.PATH, "the headers", "", "", 0, ""))
    if changes:
        sys.exit("\n".join([*changes[:20], "generate: run .venv/bin/python capi/bindings/generate.py"]))


def since(release: str) -> list[str]:
    """Returns the entries of the record of that tag or commit that the headers break, and new functions without a node
    in the version script."""
    command = ["git", "-C", ROOT, "show", f"{release}:{record.PATH}"]
    before = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    after = record.text(abi_table.read(INCLUDE))
    with open(SCRIPT) as file:
        named = set(re.findall(r"\bsluice_\w+", file.read()))
    new = sorted(record.functions(after) - record.functions(before) - named)
    return record.breaks(before, after) + [f"{name}: list this new function in capi/abi/sluice.lds" for name in new]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", metavar="FOLDER", help="write the bindings below it, not the record")
    parser.add_argument("--check", action="store_true", help="compare the record with the headers, write nothing")
    parser.add_argument("--since", metavar="RELEASE", help="fail where the headers break the record of that tag")
    options = parser.parse_args()
    if options.out is not None:
        print("\n".join(f"wrote {os.path.join(options.out, path)}" for path in write(options.out)))
        return
    if options.since is not None:
        broken = since(options.since)
        sys.exit("\n".join([f"generate: broken since {options.since}, see capi/abi/ABI.md:", *broken]) if broken else 0)
    text, path = record.text(abi_table.read(INCLUDE)), os.path.join(ROOT, record.PATH)
    if options.check:
        check(path, text)
    else:
        with open(path, "w") as file:
            file.write(text)
        print(f"wrote {record.PATH}")


if __name__ == "__main__":
    main()
