# SPDX-License-Identifier: Apache-2.0
"""Tests that each language has the same sizes, offsets and constants as C.

capi/abi/abi.txt has the values of C; capi/test/layout compares it with the headers.
"""

import dataclasses
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
from abi_table import Named, Struct, Type

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
INCLUDE = os.path.join(ROOT, "capi", "include")


def parsed(text):
    """Returns {(struct, member): (offset, size), constant: value} of a text such as abi.txt."""
    found, struct = {}, ""
    for line in text.splitlines():
        if match := re.fullmatch(r"(\w+): (\d+) bytes", line):
            struct = match.group(1)
            found[struct, ""] = (0, int(match.group(2)))
        elif line.startswith("  "):
            for offset, size, member in re.findall(r"(\d+) \+(\d+) (\w+)(?:: [^;]*)?(?:; |$)", line):
                found[struct, member] = (int(offset), int(size))
        elif re.match(r"\w+ = ", line):
            found.update({name: int(value) for name, value in re.findall(r"(\w+) = (-?\d+)(?:; |$)", line)})
        elif not line.startswith(("#", "experimental ")) and not line.endswith(";"):
            pytest.fail(f"a line that is none of a layout: {line!r}", pytrace=False)
    return found


@pytest.fixture(scope="module")
def in_c():
    with open(os.path.join(ROOT, "capi", "abi", "abi.txt")) as file:
        found = parsed(file.read())
    assert len(found) > 800
    return found


@pytest.fixture(scope="module")
def table():
    return abi_table.read(INCLUDE)


@pytest.fixture(scope="module")
def languages(run, need, library):
    """Returns {language: a function that returns its layout of a table}."""

    def rust(table, folder):
        need("rustc", "rustc")
        (folder / "sluice.rs").write_text(in_rust.bindings(table, ""))
        (folder / "main.rs").write_text(in_rust.layout_program(table))
        run("rustc", "--edition", "2021", "-D", "warnings", "main.rs", "-C", f"link-arg={library}", cwd=folder)
        return run(folder / "main", LD_LIBRARY_PATH=os.path.dirname(library))

    def fortran(table, folder):
        need("gfortran", "gfortran")
        (folder / "sluice.f90").write_text(in_fortran.bindings(table, ""))
        (folder / "main.f90").write_text(in_fortran.layout_program(table))
        run("gfortran", "-std=f2018", "-Wall", "-Werror", "sluice.f90", "main.f90", library, "-o", "main", cwd=folder)
        return run(folder / "main", LD_LIBRARY_PATH=os.path.dirname(library))

    def go(table, folder):
        need("go", "golang-go")
        (folder / "bindings").mkdir()
        (folder / "bindings/sluice.go").write_text(in_go.bindings(table, ""))
        (folder / "bindings/go.mod").write_text(in_go.MODULE)
        (folder / "main.go").write_text(in_go.layout_program(table))
        (folder / "go.mod").write_text(
            "module layout\n\ngo 1.19\n\nrequire sluice v0.0.0\n\nreplace sluice => ./bindings\n"
        )
        (folder / "libsluice.so").symlink_to(library)
        where = {"CGO_CFLAGS": f"-I{INCLUDE}", "CGO_LDFLAGS": f"-L{folder}", "GOFLAGS": "-mod=mod"}
        run("go", "build", "-o", "main", ".", cwd=folder, **where)
        return run(folder / "main", LD_LIBRARY_PATH=os.path.dirname(library))

    return {"rust": rust, "fortran": fortran, "go": go}


@pytest.mark.parametrize("language", ["rust", "fortran", "go"])
def test_Layout_InThisLanguage_IsCs(languages, language, table, in_c, tmp_path):
    assert parsed(languages[language](table, tmp_path)) == in_c


@pytest.mark.parametrize("language", ["rust", "fortran"])
def test_Layout_OneMemberOfAnotherType_IsSeen(languages, language, table, in_c, tmp_path):
    """The comparison above can fail. Go is left out: cgo would refuse to compile the damaged struct."""
    struct = table.structs["sluice_comm_config_t"]
    wider = [Named("rank", Type("scalar", "int64_t")) if one.name == "rank" else one for one in struct.members]
    damaged = dataclasses.replace(table, structs={**table.structs, struct.name: Struct(struct.name, tuple(wider))})
    found = parsed(languages[language](damaged, tmp_path))
    assert {name for name in in_c if found[name] != in_c[name]} == {
        (struct.name, one) for one in ("", "rank", "world_size", "timeout_ns", "warn_ns")
    }


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
    found = {}
    for name in table.structs:
        found[name, ""] = (0, ffi.sizeof(name))
        for member, field in ffi.typeof(name).fields:
            found[name, member] = (field.offset, ffi.sizeof(field.type))
    lib = ffi.dlopen(None)
    found.update({name: getattr(lib, name) for name in table.constants})
    assert found == in_c


def test_Table_SizesThatItCounts_AreCs(table, in_c):
    for name in table.structs:
        assert table.size(Type("struct", name)) == in_c[name, ""][1], name
