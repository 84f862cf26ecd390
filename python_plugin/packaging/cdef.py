# SPDX-License-Identifier: Apache-2.0
"""Turns the public C headers into cffi's out-of-line ABI module.

cffi's parser accepts only declarations, and `#define`s of integers (capi/bindings/declarations.py). Importing the
result needs no compiler and no parser.
"""

import contextlib
import io
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(HERE)), "capi", "bindings"))
import declarations  # noqa: E402


def generate(include_dir):
    """Returns the cdef text of all public headers."""
    macros, text = declarations.read(include_dir)
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + text


def emit(include_dir, module, path):
    """Writes the importable module and returns the cdef text."""
    import cffi

    text = generate(include_dir)
    ffi = cffi.FFI()
    ffi.set_source(module, None)
    ffi.cdef(text)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints "generating ..."
        ffi.emit_python_code(path)
    return text
