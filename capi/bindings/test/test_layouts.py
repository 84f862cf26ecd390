# SPDX-License-Identifier: Apache-2.0
"""Tests that each language has the same sizes, offsets and constants as C.

capi/abi/abi.txt has the values of C; capi/test/layout compares it with the headers.
"""

import os
import re
import subprocess
import sys

import abi_table
import cffi
import generate
import in_fortran
import in_go
import in_rust
import pytest
import record

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
INCLUDE = os.path.join(ROOT, "capi", "include")


def parsed(text):
    """Returns the numbers of each struct, member and constant of a text such as abi.txt."""
    lines = {key: line.split()[:3] for key, line in record.entries(text).items() if not line.endswith(";")}
    return {key: [int(word) for word in words if re.fullmatch(r"[-+]?\d+", word)] for key, words in lines.items()}


@pytest.fixture(scope="module")
def in_c():
    with open(os.path.join(ROOT, "capi", "abi", "abi.txt")) as file:
        found = parsed(file.read())
    assert len(found) > 800
    return found


@pytest.fixture(scope="module")
def table():
    return abi_table.read(INCLUDE)


def rust(run, need, library, table, folder):
    need("rustc", "rustc")
    (folder / "sluice.rs").write_text(in_rust.bindings(table, ""))
    (folder / "main.rs").write_text(in_rust.layout_program(table))
    run("rustc", "--edition", "2021", "-D", "warnings", "main.rs", "-C", f"link-arg={library}", cwd=folder)


def fortran(run, need, library, table, folder):
    need("gfortran", "gfortran")
    (folder / "sluice.f90").write_text(in_fortran.bindings(table, ""))
    (folder / "main.f90").write_text(in_fortran.layout_program(table))
    run("gfortran", "-std=f2018", "-Wall", "-Werror", "sluice.f90", "main.f90", library, "-o", "main", cwd=folder)


def go(run, need, library, table, folder):
    need("go", "golang-go")
    generate.write(folder)
    (folder / "main.go").write_text(in_go.layout_program(table))
    (folder / "go.mod").write_text("module layout\n\ngo 1.19\n\nrequire sluice v0.0.0\n\nreplace sluice => ./go\n")
    (folder / "libsluice.so").symlink_to(library)
    where = {"CGO_CFLAGS": f"-I{INCLUDE}", "CGO_LDFLAGS": f"-L{folder}", "GOFLAGS": "-mod=mod"}
    run("go", "build", "-o", "main", ".", cwd=folder, **where)


@pytest.mark.parametrize("build", [rust, fortran, go], ids=lambda build: build.__name__)
def test_Layout_InThisLanguage_IsCs(build, run, need, library, table, in_c, tmp_path):
    build(run, need, library, table, tmp_path)
    assert parsed(run(tmp_path / "main", LD_LIBRARY_PATH=os.path.dirname(library))) == in_c


def test_Go_IsFormattedAsGoDoes(run, need, tmp_path):
    need("gofmt", "golang-go")
    generate.write(tmp_path)
    assert run("gofmt", "-l", tmp_path / "go", os.path.join(ROOT, "examples/go")) == ""


def test_Layout_InCxx_IsCs(tmp_path):
    """Static assertions of the ABI's record also compile as C++, after the C++ header."""
    generate.write(tmp_path)
    record, script = os.path.join(ROOT, "capi/abi/abi.txt"), os.path.join(ROOT, "capi/test/layout/abi.awk")
    asserted = subprocess.run(["awk", "-f", script, record], check=True, capture_output=True, text=True).stdout
    text = '#include <cstddef>\n#include "sluice/sluice.hpp"\n'
    text += '#define STRUCT(type, size) static_assert(sizeof(type) == (size), "");\n'
    text += "#define MEMBER(type, member, offset, size, of) static_assert(offsetof(type, member) == (offset) && "
    text += 'sizeof(static_cast<type*>(nullptr)->member) == (size), "");\n'
    text += '#define DECLARATION(...) extern "C" { __VA_ARGS__; }\n'
    text += '#define CONSTANT(name, value) static_assert((name) == (value), "");\n'
    text += asserted
    includes = ["-I", INCLUDE, "-I", tmp_path / "cpp"]
    command = ["g++", "-std=c++11", "-fsyntax-only", *includes, "-x", "c++", "-"]
    assert subprocess.run(command, input=text, text=True).returncode == 0
    damaged = text.replace("sizeof(type) == (size)", "sizeof(type) == (size) + 1")
    assert subprocess.run(command, input=damaged, text=True, capture_output=True).returncode != 0


def test_Layout_InPython_IsCs(table, in_c):
    sys.path.insert(0, os.path.join(ROOT, "python_plugin", "packaging"))
    import cdef

    ffi = cffi.FFI()
    ffi.cdef(cdef.generate(INCLUDE))
    lib = ffi.dlopen(None)
    found = {(name, ""): [getattr(lib, name)] for name in table.constants}
    for name in table.structs:
        found[name, ""] = [ffi.sizeof(name)]
        for member, field in ffi.typeof(name).fields:
            found[name, member] = [field.offset, ffi.sizeof(field.type)]
    assert found == in_c
