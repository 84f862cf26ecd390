"""Turns the public C headers into cffi's out-of-line ABI module.

cffi's parser takes declarations only. So the preprocessor runs with empty system headers (cffi knows `int32_t` and
`size_t`), attributes defined away, and integer macros are added back as `#define`s. The result needs no compiler and no
parser when it is imported.
"""

import contextlib
import io
import os
import re
import subprocess
import tempfile

SYSTEM_HEADERS = ("assert.h", "limits.h", "stdbool.h", "stddef.h", "stdint.h")
INTEGER_MACRO = re.compile(r"^#define (SLUICE_\w+) \(?(-?(?:0[xX][0-9a-fA-F]+|\d+))[uUlL]*\)?$")


def header_files(include_dir):
    folder = os.path.join(include_dir, "sluice")
    return sorted("sluice/" + name for name in os.listdir(folder) if name.endswith(".h"))


def _preprocess(include_dir, source, *options):
    with tempfile.TemporaryDirectory() as empty:
        for name in SYSTEM_HEADERS:
            open(os.path.join(empty, name), "w").close()
        command = ["gcc", "-std=c99", "-nostdinc", "-E", "-P", *options]
        command += ["-D__attribute__(x)=", "-I", empty, "-I", include_dir, "-x", "c", "-"]
        done = subprocess.run(command, input=source, text=True, capture_output=True)
    if done.returncode != 0:
        raise RuntimeError("the public headers do not preprocess:\n" + done.stderr)
    return done.stdout


def _drop_bodies(text):
    """Removes `static inline` functions and static assertions, which a cdef may not hold."""
    text = re.sub(r"\b(?:_Static_assert|static_assert)\s*\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)\s*;", "", text)
    while True:
        found = re.search(r"\bstatic\s+inline\b[^;{]*\{", text)
        if not found:
            return text
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]


def generate(include_dir):
    """The cdef text of all public headers."""
    source = "".join(f'#include "{name}"\n' for name in header_files(include_dir))
    declarations = _drop_bodies(_preprocess(include_dir, source))
    defines = []
    for line in _preprocess(include_dir, source, "-dM").splitlines():
        found = INTEGER_MACRO.match(line)
        if found:
            defines.append(f"#define {found.group(1)} {found.group(2)}\n")
    return "".join(sorted(defines)) + declarations


def emit(include_dir, module, path):
    """Writes the importable module and returns the cdef text."""
    import cffi

    text = generate(include_dir)
    ffi = cffi.FFI()
    ffi.set_source(module, None)
    ffi.cdef(text)
    with contextlib.redirect_stdout(io.StringIO()):  # it says "generating ..."
        ffi.emit_python_code(path)
    return text
