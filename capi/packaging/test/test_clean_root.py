# SPDX-License-Identifier: Apache-2.0
"""Tests that a C and a C++ project build and run in a root without this checkout: every day in a bare root with this
machine's /usr and the archive, with --full also in a fresh Debian with the packages."""

import os
import shutil
import subprocess

import consumers
import pytest

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root enters another root")

# The steps of the page "The C ABI", section "Install". WHERE has the options with which CMake finds the package.
BUILD = """
set -eu
cd /project
gcc -std=c99 step.c $(pkg-config --cflags --libs sluice) -o step
g++ -std=c++11 -pthread local.cc $(pkg-config --cflags --libs sluice) -o local
./step; ./local
./local -1 2>&1 || true # an error as an exception
cmake -S . -B build -DWANTED=0.1 $WHERE >cmake.log
cmake --build build >>cmake.log
unset LD_LIBRARY_PATH
build/step; build/local
ldd build/step | grep -o 'libsluice.so.0 => [^ ]*'
"""


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, **options)
    if done.returncode != 0:
        pytest.fail(f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}{done.stderr[-3000:]}", pytrace=False)
    return done.stdout


def check(text, library):
    """Checks the output of all programs, built both ways, and the library that they loaded."""
    assert text.count(consumers.STEP) == 2 and text.count(" loss ") == 2 * consumers.LOSSES, text
    assert "INVALID_ARGUMENT: " in text and text.splitlines()[-1] == f"libsluice.so.0 => {library}"


def test_Archive_InABareRoot_BuildsAndRuns(unpacked, tmp_path):
    """The mounts are in a namespace that ends with the command, so none is left, whatever fails."""
    root = tmp_path / "root"
    for name in ("usr", "etc/alternatives", "dev", "tmp", "opt"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        os.symlink(f"usr/{name}", root / name)
    (root / "dev/null").touch()
    shutil.copytree(unpacked, root / "opt/sluice", symlinks=True)
    consumers.project(root / "project")
    binds = [("/usr", "usr"), ("/etc/alternatives", "etc/alternatives"), ("/dev/null", "dev/null")]
    script = "".join(f"mount --bind -o ro {of} {root}/{to}\n" for of, to in binds)
    (root / "build.sh").write_text(BUILD)
    environment = {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "PKG_CONFIG_PATH": "/opt/sluice/lib/pkgconfig",
        "LD_LIBRARY_PATH": "/opt/sluice/lib",
        "WHERE": "-DCMAKE_PREFIX_PATH=/opt/sluice",
    }
    command = ["unshare", "--mount", "sh", "-euc", f"{script}exec chroot {root} sh /build.sh"]
    check(run(*command, env=environment), "/opt/sluice/lib/libsluice.so.0")
    assert not os.path.ismount(root / "usr")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_Packages_InAFreshDebian_BuildAndRun(make, tmp_path):
    """debootstrap makes the root from the machine's own mirror."""
    if shutil.which("debootstrap") is None:
        pytest.skip("debootstrap is not installed here (Debian: apt-get install debootstrap)")
    targets = run("apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE)").splitlines()
    mirrors = [line.split()[0] for line in targets if line.endswith(" bookworm")]
    root, made = tmp_path / "root", make(tmp_path / "deb", "--deb")
    include = "--include=gcc,g++,cmake,make,pkg-config,libc6-dev"
    try:
        run("debootstrap", "--variant=minbase", include, "bookworm", root, mirrors[0])
        for path in made.glob("*.deb"):
            shutil.copy(path, root / "tmp")
        consumers.project(root / "project")
        (root / "build.sh").write_text(BUILD)
        inside = ["unshare", "--mount", "chroot", root]
        run(*inside, "sh", "-c", "dpkg --install /tmp/*.deb && dpkg --verify libsluice0 libsluice-dev")
        text = run(*inside, "sh", "/build.sh", env={"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "WHERE": ""})
        check(text, "/lib/x86_64-linux-gnu/libsluice.so.0")
        run(*inside, "dpkg", "--purge", "libsluice-dev", "libsluice0-dbgsym", "libsluice0")
    finally:
        shutil.rmtree(root)
