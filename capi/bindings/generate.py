"""Writes the bindings of other languages from the headers of the C ABI: one table, a template for each language.

    .venv/bin/python capi/bindings/generate.py --out FOLDER

Makes cpp/sluice/sluice.hpp, fortran/sluice.f90, go/ and rust/sluice.rs below FOLDER. The archive, the Debian package and
the build.sh of each example call it; the result is not committed.
"""

from __future__ import annotations

import argparse
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
INCLUDE = os.path.join(os.path.dirname(HERE), "include")
sys.path.insert(0, HERE)
import abi_table  # noqa: E402
import in_cxx  # noqa: E402
import in_fortran  # noqa: E402
import in_go  # noqa: E402
import in_rust  # noqa: E402

LANGUAGES = (in_cxx, in_fortran, in_go, in_rust)
GENERATED = "Written by capi/bindings/generate.py: do not edit."


def files(include_dir: str) -> dict[str, str]:
    """The text of each file by its path below the folder."""
    table = abi_table.read(include_dir)
    made = {language.PATH: language.bindings(table, GENERATED) for language in LANGUAGES}
    made["go/go.mod"] = in_go.MODULE
    return made


def write(folder: str, include_dir: str = INCLUDE) -> list[str]:
    """The paths of what it wrote, below the folder."""
    made = files(include_dir)
    for path, text in made.items():
        full = os.path.join(folder, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w") as file:
            file.write(text)
    return sorted(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where they are written")
    folder = parser.parse_args().out
    print("\n".join(f"wrote {os.path.join(folder, path)}" for path in write(folder)))


if __name__ == "__main__":
    main()
