# SPDX-License-Identifier: Apache-2.0
"""Tests the Debian packages: dpkg installs them into a separate root, and other projects build on them there."""

import os
import re
import shutil
import subprocess

import consumers
import elf
import libraries
import pytest

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="this machine has no dpkg")
PACKAGES = ["libsluice-dev", "libsluice0", "libsluice0-dbgsym"]
LIBDIR = "usr/lib/x86_64-linux-gnu"
C_LIBRARY = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Maintainer: nobody
Version: {}
Description: stands in for that of the root

"""


@pytest.fixture(scope="session")
def packages(make, tmp_path_factory):
    """Returns {name of a package: its path}."""
    made = make(tmp_path_factory.mktemp("deb"), "--deb")
    return {path.name.partition("_")[0]: path for path in sorted(made.glob("*.deb"))}


def dpkg(root, *arguments):
    as_root = [] if os.geteuid() == 0 else ["unshare", "--map-root-user"]  # files belong to root
    command = [*as_root, "dpkg", f"--root={root}", "--force-script-chrootless", *map(str, arguments)]
    environment = dict(os.environ, LC_ALL="C", DPKG_HOOK_ACTION="")
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def empty_root(folder, c_library):
    """Returns a root in which only a C library of that version is installed."""
    for name in ("updates", "info", "triggers", "parts"):
        (folder / "var/lib/dpkg" / name).mkdir(parents=True)
    (folder / "var/lib/dpkg/status").write_text(C_LIBRARY.format(c_library))
    (folder / "var/lib/dpkg/available").write_text("")
    return folder


@pytest.fixture(scope="session")
def root(packages, tmp_path_factory):
    folder = empty_root(tmp_path_factory.mktemp("root"), "2.36")
    done = dpkg(folder, "--install", *packages.values())
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def field(path, name):
    return subprocess.run(["dpkg-deb", "-f", path, name], check=True, capture_output=True, text=True).stdout.strip()


def test_Packages_MadeAgain_HaveTheSameBits(make, packages, tmp_path):
    again = make(tmp_path, "--deb", TZ="Asia/Tokyo")
    assert sorted(packages) == PACKAGES
    for path in packages.values():
        assert path.read_bytes() == (again / path.name).read_bytes(), path.name


def test_Library_DependsOnTheCLibraryThatItNeeds(packages):
    measured = ".".join(map(str, elf.GLIBC_CAPACITY))
    assert field(packages["libsluice0"], "Depends") == f"libc6 (>= {measured})"
    version = field(packages["libsluice0"], "Version")
    assert version.rpartition("-")[0] == libraries.version()
    assert field(packages["libsluice-dev"], "Depends") == f"libsluice0 (= {version})"


def test_Install_OlderCLibrary_IsRefused(packages, tmp_path):
    done = dpkg(empty_root(tmp_path, "2.31"), "--install", packages["libsluice0"])
    assert done.returncode != 0 and "libsluice0:amd64 depends on libc6 (>= 2." in done.stderr


def test_Install_FilesAreAsPacked(root):
    done = dpkg(root, "--verify", *PACKAGES)
    assert (done.returncode, done.stdout) == (0, "")
    listed = dpkg(root, "--listfiles", "libsluice0").stdout.split()
    assert f"/{LIBDIR}/libsluice.so.0" in listed and not any("include" in name for name in listed)
    listed = dpkg(root, "--listfiles", "libsluice-dev").stdout.split()
    assert "/usr/share/man/man3/sluice_moe_forward.3.gz" in listed and "/usr/share/sluice/examples/c/tcp.c" in listed


def test_DebugFiles_LieWhereDebuggersLook(root):
    for path in (root / LIBDIR).glob("libsluice*.so*"):
        found = elf.build_id(path)
        debug = root / "usr/lib/debug/.build-id" / found[:2] / f"{found[2:]}.debug"
        assert ".debug_info" in elf.sections(debug) and ".debug_info" not in elf.sections(path)


def test_SymbolsFile_NamesWhatTheLibraryExports(packages, root, tmp_path):
    subprocess.run(["dpkg-deb", "-e", packages["libsluice0"], tmp_path], check=True)
    named = re.findall(r"^ (sluice_\w+)@SLUICE_(\S+) (\S+)$", (tmp_path / "symbols").read_text(), re.MULTILINE)
    exported = elf.exported(str(root / LIBDIR / "libsluice.so.0"))
    assert "sluice_version" in exported and sorted(named) == sorted(
        (name, *2 * [version.removeprefix("SLUICE_")]) for name, version in exported.items()
    )


def test_PkgConfig_ProjectElsewhere_BuildsAndRuns(root, tmp_path):
    where = {"PKG_CONFIG_LIBDIR": str(root / LIBDIR / "pkgconfig"), "PKG_CONFIG_SYSROOT_DIR": str(root)}
    consumers.with_pkg_config(consumers.project(tmp_path / "project"), root / LIBDIR, **where)


def test_FindPackage_ProjectElsewhere_BuildsAndRuns(root, tmp_path):
    consumers.with_cmake(consumers.project(tmp_path / "project"), root / LIBDIR, root / "usr")


def test_Remove_LeavesNothing(packages, tmp_path):
    root = empty_root(tmp_path, "2.36")
    assert dpkg(root, "--install", *packages.values()).returncode == 0
    assert dpkg(root, "--purge", *PACKAGES).returncode == 0
    assert [path for path in root.rglob("*sluice*") if path.suffix != ".log"] == []
