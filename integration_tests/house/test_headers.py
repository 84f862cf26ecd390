# SPDX-License-Identifier: Apache-2.0
"""Tests that each public header compiles alone, without a warning, in every dialect of C and C++ of users."""

import subprocess

import pytest

DIALECTS = [
    *((compiler, "c", standard) for compiler in ("gcc", "clang-14") for standard in ("c99", "c11", "c17")),
    *((compiler, "c++", standard) for compiler in ("g++", "clang++-14") for standard in ("c++11", "c++17", "c++20")),
]
WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wundef", "-Werror"]


def compile_text(compiler, language, standard, include_dir, text):
    command = [compiler, f"-std={standard}", *WARNINGS, "-I", include_dir, "-fsyntax-only", "-x", language, "-"]
    if language == "c":
        command[2:2] = ["-Wstrict-prototypes", "-Wc++-compat"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


@pytest.mark.parametrize(("compiler", "language", "standard"), DIALECTS, ids=lambda value: value)
def test_PublicHeader_CompiledAlone_HasNoWarning(compiler, language, standard, include_dir, public_headers):
    for header in public_headers:
        # Including it twice tests the guard. The declaration avoids C's warning about empty files.
        text = f'#include "{header}"\n#include "{header}"\nextern int translation_unit_is_not_empty;\n'
        done = compile_text(compiler, language, standard, include_dir, text)
        assert done.returncode == 0, f"{header} as {standard}:\n{done.stderr}"
