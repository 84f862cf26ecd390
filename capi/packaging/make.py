# SPDX-License-Identifier: Apache-2.0
"""Packs the C library for projects that build on it: headers, library, pkg-config and CMake files, manual, examples.

    python3 capi/packaging/make.py [--deb] [--out DIR]

Needs the packages that `third_party/setup/setup.sh archive` installs, but no .venv. The library contains the CUDA
kernels if a compiler for them is installed.

Makes DIR/sluice-VERSION-linux-x86_64.tar.gz (default of DIR: `dist`), and with --deb Debian packages instead:
libsluice0, libsluice-dev, libsluice0-dbgsym. One commit always gives the same bits.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile

import abi_since
import archive
import debian
import elf
import libraries
import man_pages
import manual
import tree
from libraries import ROOT, Failure


def make_archive(out: str, built: list[str], version: str) -> str:
    name = f"sluice-{version}-linux-x86_64"
    path = os.path.join(out, f"{name}.tar.gz")
    with tempfile.TemporaryDirectory() as top:
        tree.runtime(top, "lib", built, version, os.path.join(top, "lib"))
        tree.development(top, "lib", version, "${pcfiledir}/../..")
        about = os.path.join(top, "share/doc/sluice")
        manual.write(about)
        man_pages.write(os.path.join(top, "share/man/man3"), archive.source_date(), is_packed=False)
        for page in ("CHANGELOG.md", "LICENSE"):
            tree.copy(os.path.join(ROOT, page), os.path.join(about, page))
        archive.write(path, top, name, archive.source_date())
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deb", action="store_true", help="Debian packages instead of an archive")
    parser.add_argument("--out", default=os.path.join(ROOT, "dist"), help="where it is put (dist)")
    options = parser.parse_args()
    built = libraries.build()
    if not any(name.startswith("libmpi.so") for path in built for name in elf.dynamic(path, "NEEDED")):
        raise Failure("this machine has no Open MPI, so libsluice_mpi.so would be empty: install libopenmpi-dev")
    abi_since.check_abi(libraries.version())
    os.makedirs(options.out, exist_ok=True)
    if options.deb:
        paths = debian.make(options.out, built, libraries.version())
    else:
        paths = [make_archive(options.out, built, libraries.version())]
    print("\n".join(paths))


if __name__ == "__main__":
    try:
        main()
    except Failure as error:
        sys.exit(f"make: FAILED: {error}")
