# SPDX-License-Identifier: Apache-2.0
"""Tests that public headers compile alone, without a warning, in every dialect of C and C++ of users, and that the
output of capi/bindings/generate.py for other languages follows them."""

import os
import subprocess
import sys

import pytest

HEADER = """
#ifndef SLUICE_X_H_
#define SLUICE_X_H_
#include <stdint.h>
enum { SLUICE_A = 1, SLUICE_B };
typedef struct sluice_x_s sluice_x_t;
typedef struct sluice_pair_s { int32_t left; const int32_t* right; } sluice_pair_t;
int32_t sluice_x_create(const sluice_pair_t* pair, sluice_x_t** out_x);
void sluice_x_destroy(sluice_x_t* x);
#endif
"""


@pytest.fixture(scope="module")
def generate(root):
    sys.path.insert(0, os.path.join(root, "capi", "bindings"))
    import generate

    return generate


def test_Bindings_OfChangedHeaders_Differ(generate, include_dir, tmp_path):
    """The bindings of every language get a new function."""
    (tmp_path / "sluice").mkdir()
    for name in os.listdir(os.path.join(include_dir, "sluice")):
        with open(os.path.join(include_dir, "sluice", name)) as file:
            text = file.read()
        (tmp_path / "sluice" / name).write_text(text)
    (tmp_path / "sluice" / "zebra.h").write_text(
        "typedef struct sluice_zebra_s sluice_zebra_t;\nvoid sluice_zebra_destroy(sluice_zebra_t* zebra);\n"
    )
    before, after = generate.files(include_dir), generate.files(str(tmp_path))
    assert len(generate.LANGUAGES) == 4
    for language in generate.LANGUAGES:
        assert "zebra" not in before[language.PATH] and "sluice_zebra_destroy" in after[language.PATH], language.PATH


def compile_text(compiler, standard, text, *flags):
    warnings = ["-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror"]
    language = "c++" if "++" in compiler else "c"
    command = [compiler, f"-std={standard}", *warnings, *flags, "-fsyntax-only", "-x", language, "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True)


DIALECTS = [
    *((compiler, standard) for compiler in ("gcc", "clang-14") for standard in ("c99", "c11", "c17")),
    *((compiler, standard) for compiler in ("g++", "clang++-14") for standard in ("c++11", "c++17", "c++20")),
]


@pytest.mark.parametrize(("compiler", "standard"), DIALECTS)
def test_Headers_EachCompiledAloneInEveryDialect_HaveNoWarning(compiler, standard, generate, include_dir, tmp_path):
    """Including a header twice tests its guard. The declaration avoids C's warning about empty files."""
    headers = sorted(
        f"sluice/{name}" for name in os.listdir(os.path.join(include_dir, "sluice")) if name.endswith(".h")
    )
    assert "sluice/sluice.h" in headers
    for header in headers:
        text = f'#include "{header}"\n#include "{header}"\nextern int translation_unit_is_not_empty;\n'
        flags = ["-Wundef", *(["-Wstrict-prototypes", "-Wc++-compat"] if "++" not in compiler else [])]
        done = compile_text(compiler, standard, text, *flags, "-I", include_dir)
        assert done.returncode == 0, f"{header} as {standard}:\n{done.stderr}"
    if "++" in compiler:
        generate.write(tmp_path)
        text = '#include "sluice/sluice.hpp"\n#include "sluice/sluice.hpp"\nextern int it_is_not_empty;\n'
        done = compile_text(compiler, standard, text, "-Wconversion", "-I", include_dir, "-I", str(tmp_path / "cpp"))
        assert done.returncode == 0, done.stderr


def test_Table_DeclarationThatNoTemplateKnows_IsRefused(generate, tmp_path):
    """Bindings must not leave out a declaration silently."""
    import abi_table

    (tmp_path / "sluice").mkdir()
    (tmp_path / "sluice" / "x.h").write_text(HEADER)
    table = abi_table.read(str(tmp_path))
    assert table.constants == {"SLUICE_A": 1, "SLUICE_B": 2} and table.handles == {"sluice_x_t": "sluice_x_destroy"}
    (tmp_path / "sluice" / "x.h").write_text(HEADER.replace("#endif", "extern int sluice_global;\n#endif"))
    with pytest.raises(ValueError, match="no template knows"):
        abi_table.read(str(tmp_path))
