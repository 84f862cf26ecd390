# SPDX-License-Identifier: Apache-2.0
"""Tests the archive of the C library: its content, its dependencies, and builds of other projects on it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile

import elf
import libraries
import manual
import pycparser
import pytest

sys.path.insert(0, os.path.join(libraries.ROOT, "integration_tests", "house"))
import test_symbols as symbols

# 5 MiB: kernels of three instruction sets, each for plain and for packed weights, and the images of CUDA
STRIPPED_BYTES = 5 << 20


def shared_objects(tree):
    return [path for path in sorted((tree / "lib").glob("*.so*")) if path.suffix != ".debug" and not path.is_symlink()]


def test_Archive_MadeAgainElsewhere_HasTheSameBits(make, made, tmp_path):
    before = os.umask(0o077)
    try:
        again = make(tmp_path / "again", TZ="Asia/Tokyo", LC_ALL="C.UTF-8")
    finally:
        os.umask(before)
    first, second = (next(folder.glob("*.tar.gz")) for folder in (made, again))
    assert first.name == second.name == f"sluice-{libraries.version()}-linux-x86_64.tar.gz"
    assert first.read_bytes() == second.read_bytes()


def test_Archive_SourceDate_IsEveryDateInIt(make, tmp_path):
    path = next(make(tmp_path, SOURCE_DATE_EPOCH="1000000000").glob("*.tar.gz"))
    with tarfile.open(path) as tar:
        entries = tar.getmembers()
    assert {entry.mtime for entry in entries} == {1000000000}
    assert {(entry.uid, entry.gid, entry.uname, entry.gname) for entry in entries} == {(0, 0, "root", "root")}
    assert {entry.mode for entry in entries} == {0o644, 0o755, 0o777}  # files, folders, links


def test_Archive_Holds_WhatUsersBuildWith(unpacked):
    version = libraries.version()
    assert sorted(os.listdir(unpacked / "lib")) == sorted(
        [f"libsluice.so.{version}", f"libsluice.so.{version}.debug", "libsluice.so.0", "libsluice.so"]
        + ["libsluice_mpi.so", "libsluice_mpi.so.debug", "cmake", "pkgconfig"]
    )
    assert os.readlink(unpacked / "lib/libsluice.so") == "libsluice.so.0"
    assert os.readlink(unpacked / "lib/libsluice.so.0") == f"libsluice.so.{version}"
    headers = os.listdir(os.path.join(libraries.INCLUDE, "sluice"))
    assert sorted(os.listdir(unpacked / "include/sluice")) == sorted([*headers, "sluice.hpp"])
    assert sorted(os.listdir(unpacked / "share/doc/sluice")) == sorted(
        ["CHANGELOG.md", "LICENSE", *[f"{page}.md" for page in manual.PAGES]]
    )
    bindings = [path for path in (unpacked / "share/sluice/bindings").rglob("*") if path.is_file()]
    assert sorted(path.name for path in bindings) == ["go.mod", "sluice.f90", "sluice.go", "sluice.rs"]
    written = [path for path in unpacked.rglob("sluice*") if path.suffix in (".pc", ".cmake")]
    assert len(written) == 3 and not any(re.search(r"@[A-Z]+@", path.read_text()) for path in written)


def test_Library_IsStripped_AndItsDebugFileFitsIt(unpacked):
    for path in shared_objects(unpacked):
        debug = path.with_name(f"{path.name}.debug")
        here, there = elf.sections(path), elf.sections(debug)
        assert ".gnu_debuglink" in here and not {".symtab", ".debug_info"} & here, path.name
        assert {".symtab", ".debug_info", ".debug_line"} <= there, path.name
        assert elf.build_id(path) == elf.build_id(debug)
        assert path.stat().st_size < STRIPPED_BYTES
    assert len(shared_objects(unpacked)) == 2


def test_Library_SymbolsAndName_AreThoseOfTheAbi(unpacked):
    path = unpacked / "lib" / "libsluice.so.0"
    assert symbols.dynamic_symbols(path)[0].keys() == symbols.functions()
    assert elf.dynamic(path, "SONAME") == ["libsluice.so.0"]
    assert set(elf.dynamic(path, "NEEDED")) <= symbols.ALLOWED_LIBRARIES


def test_Libraries_NeedAnOldEnoughCLibrary_AndSearchNoFolderOfTheBuilder(unpacked):
    found = shared_objects(unpacked)
    assert (2, 2) < elf.glibc(found) <= elf.GLIBC_CAPACITY
    for path in found:
        assert elf.needs(path, "GLIBCXX") == elf.needs(path, "CXXABI") == ()
        assert elf.dynamic(path, "RPATH") == elf.dynamic(path, "RUNPATH") == []


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", True), ("0", True), ("0.1", True), ("0.1.0", True), ("0.0", False), ("0.2", False), ("1", False)],
)
def test_FindPackage_Version_IsTakenOrRefused(unpacked, tmp_path, wanted, found):
    """Before 1.0 a minor version may change anything."""
    text = f"cmake_minimum_required(VERSION 3.13)\nproject(version NONE)\nfind_package(sluice {wanted} REQUIRED)\n"
    (tmp_path / "CMakeLists.txt").write_text(text)
    command = ["cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={unpacked}"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode == 0) == found, done.stderr
    assert found or f"version: {libraries.version()}" in done.stderr


def headings(text):
    """Returns the anchors of a page's headings as GitHub names them, which the links between pages use."""
    found = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found]


def test_Manual_LinksLeadSomewhere(unpacked):
    pages = {path.name: path.read_text() for path in (unpacked / "share/doc/sluice").iterdir()}
    anchors = {f"{name}#{heading}" for name, text in pages.items() for heading in headings(text)}
    links = [(name, href) for name in pages if name != "CHANGELOG.md" for _, href in manual.LINK.findall(pages[name])]
    inside = [f"{href if href[0] != '#' else name + href}" for name, href in links if "://" not in href]
    assert len(inside) > 10 and [href for href in inside if href not in pages and href not in anchors] == []
    assert "sluice_moe_forward" in pages["c-abi.md"]


def test_Manual_LinkToAPageThatIsNotInIt_BecomesText():
    text = "<!-- a mark -->\n![picture](a.svg)\n[in](tuning.md#x) [out](../README.md) [web](https://example.org)\n"
    assert manual.render(text) == "[in](tuning.md#x) out [web](https://example.org)\n"


def test_ManPages_EveryFunction_HasOneThatManShows(unpacked):
    pages = sorted((unpacked / "share/man/man3").iterdir())
    assert [page.name for page in pages] == [f"{name}.3" for name in sorted(symbols.functions())]
    for page in pages:
        text = page.read_text()
        assert re.search(r"^\.SH DESCRIPTION\n(?!\.SH|\.PP\nExperimental)", text, re.MULTILINE), page.name
        assert page.stem in text.split(".SH DESCRIPTION")[0].split(".SH SYNOPSIS")[1]
    if shutil.which("groff"):
        done = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-z", *pages], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("man"):
        command = ["man", "-M", unpacked / "share/man", "sluice_moe_forward"]
        shown = subprocess.run(
            command, capture_output=True, text=True, env=dict(os.environ, MANWIDTH="100", LC_ALL="C")
        )
        assert shown.returncode == 0, shown.stderr
        said = " ".join(shown.stdout.split())
        assert "Runs the layer forward." in said and "struct sluice_moe_forward_args_s" in said
        assert "sluice_stream_t stream, sluice_step_t** out_step);" in said


def test_Examples_OfTheArchive_BuildByTheirScriptAndRun(unpacked, tmp_path):
    moved = shutil.copytree(unpacked, tmp_path / "moved", symlinks=True)
    script = moved / "share/sluice/examples/c/build.sh"
    done = subprocess.run([script, tmp_path / "out"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([tmp_path / "out/local4", "2"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count(" loss ") >= 5, done.stdout + done.stderr


def test_Tree_LaidOut_NeedsNoPythonPackageButPycparser(tmp_path):
    """The interpreter has no packages of .venv, only the one that setup.sh installs for the archive."""
    os.symlink(os.path.dirname(pycparser.__file__), tmp_path / "pycparser")
    code = """
import sys
sys.path += sys.argv[1:3]
import make, man_pages, manual, tree
tree.development(sys.argv[3], "lib", "0.1.0", "/usr")
manual.write(sys.argv[3] + "/share/doc/sluice")
man_pages.write(sys.argv[3] + "/share/man/man3", 0, False)
"""
    packaging, made = os.path.dirname(os.path.abspath(manual.__file__)), tmp_path / "made"
    subprocess.run([sys.executable, "-S", "-c", code, packaging, tmp_path, made], check=True)
    assert (made / "share/sluice/bindings").is_dir() and (made / "share/doc/sluice/c-abi.md").is_file()
