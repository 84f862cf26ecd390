# SPDX-License-Identifier: Apache-2.0
"""Tests the declarations for cffi that are made from C headers."""

import os
import sys

import cffi
import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
sys.path.insert(0, os.path.join(ROOT, "python_plugin", "packaging"))
import cdef  # noqa: E402

HEADER = """
#ifndef SLUICE_X_H_
#define SLUICE_X_H_
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif
#define SLUICE_API __attribute__((visibility("default"))) __attribute__((warn_unused_result))
#define SLUICE_MAX_THINGS 8u
#define SLUICE_NONE (-1)
#define SLUICE_NAME "text"
enum { SLUICE_A = 1, SLUICE_B = 1 << 3 };
typedef struct sluice_x_s {
  size_t struct_size;
  int32_t things[SLUICE_MAX_THINGS];
} sluice_x_t;
typedef void (*sluice_fn_t)(void* user, const char* text);
SLUICE_API int32_t sluice_x(const sluice_x_t* x, sluice_fn_t fn);
static inline int32_t sluice_y(int32_t a) { if (a) { return 1; } return 0; }
_Static_assert(sizeof(size_t) == 8, "64 bits (only)");
#ifdef __cplusplus
}
#endif
#endif
"""


@pytest.fixture
def include_dir(tmp_path):
    (tmp_path / "sluice").mkdir()
    (tmp_path / "sluice" / "x.h").write_text(HEADER)
    return str(tmp_path)


def test_Generate_HeaderWithAllForms_IsReadByCffi(include_dir):
    ffi = cffi.FFI()
    ffi.cdef(cdef.generate(include_dir))
    assert ffi.sizeof("sluice_x_t") == 8 + 8 * 4
    assert "sluice_y" not in cdef.generate(include_dir)


def test_Emit_ModuleWithoutCompiler_HasConstants(include_dir, tmp_path, monkeypatch):
    cdef.emit(include_dir, "emitted_abi", str(tmp_path / "emitted_abi.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    import emitted_abi

    lib = emitted_abi.ffi.dlopen(None)
    assert (lib.SLUICE_B, lib.SLUICE_MAX_THINGS, lib.SLUICE_NONE) == (8, 8, -1)


def test_Generate_BrokenHeader_ShowsTheCompilersWords(include_dir, tmp_path):
    (tmp_path / "sluice" / "x.h").write_text('#include "sluice/absent.h"\n')
    with pytest.raises(RuntimeError, match=r"absent\.h"):
        cdef.generate(include_dir)
