# SPDX-License-Identifier: Apache-2.0
"""Makes the Debian packages of the C library: libsluice0, libsluice-dev, and libsluice0-dbgsym for debuggers.

dpkg-deb packs the tree that `tree.py` lays out below /usr. The control files are written here; debhelper is not needed.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tempfile
import time

import archive
import elf
import man_pages
import manual
import tree
from libraries import ROOT, run

REVISION = "1"
LIBDIR = "lib/x86_64-linux-gnu"
MAINTAINER = "Sluice maintainers <maintainers@sluice.example>"
SUMMARY = "expert-parallel Mixture-of-Experts layers"
ABOUT = """\
 Sluice runs the Mixture-of-Experts layers of a model, forward and backward,
 with the experts spread over ranks. The rows of one chunk travel while another
 chunk is computed. It is a C library that needs the C library and nothing else.
"""
COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: sluice

Files: *
Copyright: 2026 the Sluice contributors
License: Apache-2.0

License: Apache-2.0
 On Debian systems the full text of the Apache License, version 2.0, is in
 /usr/share/common-licenses/Apache-2.0.
"""


def _fields(version: str, glibc: str) -> dict[str, list[str]]:
    """Returns the fields of each package's control file in addition to the common ones."""
    same = f"(= {version})"
    return {
        "libsluice0": [
            "Section: libs",
            "Multi-Arch: same",
            f"Depends: libc6 (>= {glibc})",
            "Suggests: libdnnl2, libopenblas0, libopenmpi3",  # loaded with dlopen if installed
            f"Description: {SUMMARY}\n{ABOUT}",
        ],
        "libsluice-dev": [
            "Section: libdevel",
            "Multi-Arch: same",
            f"Depends: libsluice0 {same}",
            f"Description: {SUMMARY} (development files)\n{ABOUT} .\n"
            " This package has the headers, bindings of other languages, the manual,\n"
            " examples, and the files for pkg-config and CMake.\n",
        ],
        "libsluice0-dbgsym": [
            "Section: debug",
            "Multi-Arch: same",
            f"Depends: libsluice0 {same}",
            f"Description: debug symbols for libsluice0\n{ABOUT}",
        ],
    }


def _changelog(version: str, seconds: int) -> bytes:
    date = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(seconds))
    text = f"sluice ({version}) unstable; urgency=medium\n\n  * Packed from the sources of that commit.\n\n"
    return gzip.compress((text + f" -- {MAINTAINER}  {date}\n").encode(), 9, mtime=seconds)


def _symbols(library: str, upstream: str) -> str:
    """Returns the symbols file: the version that added each symbol, so that programs depend on the oldest sufficient
    version."""
    lines, since = ["libsluice.so.0 libsluice0 #MINVER#"], elf.exported(library)
    lines += [f" {node}@{node} {node.removeprefix('SLUICE_')}" for node in sorted(set(since.values()))]
    lines += [f" {name}@{node} {node.removeprefix('SLUICE_')}" for name, node in sorted(since.items())]
    return "\n".join(lines).replace("#MINVER#", f"(>= {upstream})") + "\n"


def _lay_out(top: str, built: list[str], upstream: str) -> None:
    """Lays out the files of each package below a folder with the package's name."""
    at = {package: os.path.join(top, package, "usr") for package in _fields("", "")}
    with tempfile.TemporaryDirectory() as debug:
        tree.runtime(at["libsluice0"], LIBDIR, built, upstream, debug)
        for name in sorted(os.listdir(debug)):
            found = elf.build_id(os.path.join(debug, name))
            folder = os.path.join(at["libsluice0-dbgsym"], "lib/debug/.build-id", found[:2])
            tree.copy(os.path.join(debug, name), os.path.join(folder, f"{found[2:]}.debug"))
    tree.development(at["libsluice-dev"], LIBDIR, upstream, "/usr")
    about = os.path.join(at["libsluice-dev"], "share/doc/libsluice-dev")
    manual.write(about)
    man_pages.write(os.path.join(at["libsluice-dev"], "share/man/man3"), archive.source_date(), is_packed=True)
    with open(os.path.join(ROOT, "CHANGELOG.md"), "rb") as file, open(os.path.join(about, "changelog.gz"), "wb") as out:
        out.write(gzip.compress(file.read(), 9, mtime=0))


def _control(folder: str, package: str, fields: list[str], version: str, upstream: str) -> None:
    files = [name for name in archive.entries(folder) if os.path.isfile(os.path.join(folder, name))]
    files = [name for name in files if not os.path.islink(os.path.join(folder, name))]
    kib = sum(-(-os.path.getsize(os.path.join(folder, name)) // 1024) for name in files)
    head = [f"Package: {package}", "Source: sluice", f"Version: {version}", "Architecture: amd64", "Priority: optional"]
    head += [f"Maintainer: {MAINTAINER}", f"Installed-Size: {kib}"]
    sums = []
    for name in files:
        with open(os.path.join(folder, name), "rb") as file:
            sums.append(f"{hashlib.md5(file.read()).hexdigest()}  {name}\n")
    debian = os.path.join(folder, "DEBIAN")
    tree.write(os.path.join(debian, "control"), "\n".join(head + fields))
    tree.write(os.path.join(debian, "md5sums"), "".join(sums))
    if package == "libsluice0":
        tree.write(os.path.join(debian, "shlibs"), f"libsluice 0 libsluice0 (>= {upstream})\n")
        tree.write(
            os.path.join(debian, "symbols"), _symbols(os.path.join(folder, "usr", LIBDIR, "libsluice.so.0"), upstream)
        )
        tree.write(os.path.join(debian, "triggers"), "activate-noawait ldconfig\n")


def _set_modes(folder: str) -> None:
    """Sets the modes of all files and folders, so that the packages do not depend on the umask."""
    for name in ["", *archive.entries(folder)]:
        path = os.path.join(folder, name)
        if not os.path.islink(path):
            os.chmod(path, 0o755 if os.path.isdir(path) else 0o644)


def make(out: str, built: list[str], upstream: str) -> list[str]:
    """Packs the packages into the folder `out`, and returns their paths."""
    version, seconds, paths = f"{upstream}-{REVISION}", archive.source_date(), []
    os.environ["SOURCE_DATE_EPOCH"] = str(seconds)  # dpkg-deb's dates
    glibc = ".".join(map(str, elf.glibc(built)))
    with tempfile.TemporaryDirectory() as top:
        _lay_out(top, built, upstream)
        for package, fields in _fields(version, glibc).items():
            folder = os.path.join(top, package)
            about = os.path.join(folder, "usr/share/doc", package)
            tree.write(os.path.join(about, "copyright"), COPYRIGHT)
            with open(os.path.join(about, "changelog.Debian.gz"), "wb") as file:
                file.write(_changelog(version, seconds))
            _control(folder, package, fields, version, upstream)
            _set_modes(folder)
            paths.append(os.path.join(out, f"{package}_{version}_amd64.deb"))
            # One thread: with more, xz divides the data by the number of threads, and the bits differ.
            run("dpkg-deb", "--root-owner-group", "-Zxz", "--threads-max=1", "--build", folder, paths[-1])
    return paths
