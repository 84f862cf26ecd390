"""Writes what other languages know of the C ABI, from its headers: one table, a template for each language.

    .venv/bin/python capi/bindings/generate.py [--check]

--check  writes nothing, and fails where a file is not what it would write
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
sys.path.insert(0, HERE)
import abi_table  # noqa: E402
import in_cxx  # noqa: E402
import in_fortran  # noqa: E402
import in_go  # noqa: E402
import in_rust  # noqa: E402

LANGUAGES = (in_cxx, in_fortran, in_go, in_rust)
GENERATED = "Written by capi/bindings/generate.py: do not edit."


def files(include_dir: str) -> dict[str, str]:
    """What each file should hold, by its path below the root."""
    table = abi_table.read(include_dir)
    return {language.PATH: language.bindings(table, GENERATED) for language in LANGUAGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="say what is out of date, write nothing")
    options = parser.parse_args()
    stale = []
    for path, text in files(os.path.join(ROOT, "capi", "include")).items():
        full, before = os.path.join(ROOT, path), ""
        if os.path.exists(full):
            with open(full) as file:
                before = file.read()
        if before == text:
            continue
        stale.append(path)
        if options.check:
            changes = difflib.unified_diff(before.splitlines(), text.splitlines(), path, "generated", "", "", 0, "")
            print("\n".join(list(changes)[:20]))
        else:
            with open(full, "w") as file:
                file.write(text)
    if options.check and stale:
        sys.exit(f"generate: {', '.join(stale)}: run .venv/bin/python capi/bindings/generate.py")
    print("\n".join(f"wrote {path}" for path in stale) or "all bindings are those of the headers")


if __name__ == "__main__":
    main()
