# SPDX-License-Identifier: Apache-2.0
"""Tests the exported and required symbols of libsluice.so.0."""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "capi", "bindings"))
import record  # noqa: E402

ALLOWED_LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
FOREIGN = re.compile(
    r"^(_Z|__cxa_throw|__gxx_|Py[A-Z]|_Py|aoti_|torch_|cuda|nccl|cublas|MPI_|dnnl_|cblas_|[sd]gemm_|GOMP_|omp_)"
)


def readelf(option, path):
    return subprocess.run(["readelf", "-W", option, path], check=True, capture_output=True, text=True).stdout


def dynamic_symbols(path):
    """Returns ({exported symbol: version}, {imported symbols with their version})."""
    exported, imported = {}, set()
    for line in readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) < 8 or not fields[0].rstrip(":").isdigit():
            continue
        name, bind, index = fields[7], fields[4], fields[6]
        if index == "UND":
            imported.add(name)
        elif bind in ("GLOBAL", "WEAK") and index != "ABS":
            plain, _, version = name.partition("@")
            exported[plain] = version.lstrip("@")
    return exported, imported


def functions():
    """Returns the functions of the public headers, of which test_abi.py shows that abi.txt lists them all."""
    with open(os.path.join(ROOT, record.PATH)) as file:
        return record.functions(file.read())


def test_ExportedSymbols_AreTheFunctionsOfTheHeaders(libsluice):
    assert dynamic_symbols(libsluice)[0] == dict.fromkeys(functions(), "SLUICE_0.1")


def test_Needed_IsTheCLibraryOnly(libsluice):
    dynamic = readelf("--dynamic", libsluice)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    assert "libc.so.6" in needed
    assert needed <= ALLOWED_LIBRARIES
    assert re.findall(r"\(SONAME\).*\[(.*)\]", dynamic) == ["libsluice.so.0"]
    assert "TEXTREL" not in dynamic and "RPATH" not in dynamic and "RUNPATH" not in dynamic


def test_Imports_NothingOfTorchCxxOrPython(libsluice):
    _, imported = dynamic_symbols(libsluice)
    assert any("@GLIBC_" in name for name in imported)
    assert sorted(name for name in imported if FOREIGN.match(name) or "GLIBCXX" in name or "CXXABI" in name) == []


def test_Stack_IsNotExecutable(libsluice):
    line = next(line for line in readelf("--program-headers", libsluice).splitlines() if "GNU_STACK" in line)
    assert " RW " in line and "RWE" not in line
