# SPDX-License-Identifier: Apache-2.0
"""Checks our prototypes of CUDA, cuBLAS and NCCL against the vendors' headers, and that their libraries have every
symbol. Needs no GPU, as the libraries can be loaded without one.

    check.py [--folder FOLDER]    the folder of the unpacked wheels of requirements.txt (default: .venv-vendor)

Ends with `vendor: N passed, N failed`.
"""

import argparse
import ctypes
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
# Our enumerators and macros, and the names that the vendors give those values.
VALUES = {
    "backend/device/cuda/cuda_driver.h": {
        "SLUICE_CU_INVALID_VALUE": "CUDA_ERROR_INVALID_VALUE",
        "SLUICE_CU_OUT_OF_MEMORY": "CUDA_ERROR_OUT_OF_MEMORY",
        "SLUICE_CU_NOT_READY": "CUDA_ERROR_NOT_READY",
        "SLUICE_CU_STREAM_NON_BLOCKING": "CU_STREAM_NON_BLOCKING",
        "SLUICE_CU_EVENT_DEFAULT": "CU_EVENT_DEFAULT",
        "SLUICE_CU_EVENT_DISABLE_TIMING": "CU_EVENT_DISABLE_TIMING",
        "SLUICE_CU_MEMHOSTALLOC_PORTABLE": "CU_MEMHOSTALLOC_PORTABLE",
        "SLUICE_CU_MEMHOSTREGISTER_PORTABLE": "CU_MEMHOSTREGISTER_PORTABLE",
        "SLUICE_CU_POINTER_MEMORY_TYPE": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE",
        "SLUICE_CU_POINTER_DEVICE_ORDINAL": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
        "SLUICE_CU_MEMORY_HOST": "CU_MEMORYTYPE_HOST",
        "SLUICE_CU_MEMORY_DEVICE": "CU_MEMORYTYPE_DEVICE",
        "SLUICE_CU_CAPTURE_NONE": "CU_STREAM_CAPTURE_STATUS_NONE",
        "SLUICE_CU_ATTRIBUTE_SMS": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
        "SLUICE_CU_ATTRIBUTE_PCI_BUS": "CU_DEVICE_ATTRIBUTE_PCI_BUS_ID",
        "SLUICE_CU_ATTRIBUTE_PCI_DEVICE": "CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID",
        "SLUICE_CU_ATTRIBUTE_PCI_DOMAIN": "CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID",
        "SLUICE_CU_ATTRIBUTE_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
        "SLUICE_CU_ATTRIBUTE_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
        "SLUICE_CU_ATTRIBUTE_HOST_NUMA_ID": "CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID",
    },
    "backend/gemm/cublas/cublas_symbols.h": {
        "SLUICE_CUBLAS_ALLOC_FAILED": "CUBLAS_STATUS_ALLOC_FAILED",
        "SLUICE_CUBLAS_INVALID_VALUE": "CUBLAS_STATUS_INVALID_VALUE",
        "SLUICE_CUBLAS_ARCH_MISMATCH": "CUBLAS_STATUS_ARCH_MISMATCH",
        "SLUICE_CUBLAS_NOT_SUPPORTED": "CUBLAS_STATUS_NOT_SUPPORTED",
        "SLUICE_CUBLAS_OP_N": "CUBLAS_OP_N",
        "SLUICE_CUBLAS_OP_T": "CUBLAS_OP_T",
        "SLUICE_CUBLAS_R_32F": "CUDA_R_32F",
        "SLUICE_CUBLAS_R_64F": "CUDA_R_64F",
        "SLUICE_CUBLAS_R_16F": "CUDA_R_16F",
        "SLUICE_CUBLAS_R_16BF": "CUDA_R_16BF",
        "SLUICE_CUBLAS_COMPUTE_32F": "CUBLAS_COMPUTE_32F",
        "SLUICE_CUBLAS_COMPUTE_TF32": "CUBLAS_COMPUTE_32F_FAST_TF32",
        "SLUICE_CUBLAS_COMPUTE_64F": "CUBLAS_COMPUTE_64F",
        "SLUICE_CUBLAS_MATH_FULL_REDUCTION": "CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION",
        "SLUICE_CUBLAS_ALGORITHM_DEFAULT": "CUBLAS_GEMM_DEFAULT",
    },
    "backend/gemm/cublas/cublaslt.h": {
        "SLUICE_CUBLASLT_DESC_TRANS_A": "CUBLASLT_MATMUL_DESC_TRANSA",
        "SLUICE_CUBLASLT_DESC_TRANS_B": "CUBLASLT_MATMUL_DESC_TRANSB",
        "SLUICE_CUBLASLT_LAYOUT_COLUMNS": "CUBLASLT_MATRIX_LAYOUT_COLS",
        "SLUICE_CUBLASLT_PREF_MAX_WORKSPACE": "CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES",
        "SLUICE_CUBLASLT_PREF_REDUCTIONS": "CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK",
        "SLUICE_CUBLASLT_PREF_ALIGNMENT_A": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES",
        "SLUICE_CUBLASLT_PREF_ALIGNMENT_B": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES",
        "SLUICE_CUBLASLT_PREF_ALIGNMENT_C": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES",
        "SLUICE_CUBLASLT_PREF_ALIGNMENT_D": "CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES",
        "SLUICE_CUBLASLT_REDUCTION_INPLACE": "CUBLASLT_REDUCTION_SCHEME_INPLACE",
        "SLUICE_CUBLASLT_REDUCTION_COMPUTE_TYPE": "CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE",
    },
    "backend/comm/nccl/nccl_library.h": {
        "SLUICE_NCCL_REMOTE_ERROR": "ncclRemoteError",
        "SLUICE_NCCL_IN_PROGRESS": "ncclInProgress",
        "SLUICE_NCCL_UINT8": "ncclUint8",
        "SLUICE_NCCL_MAGIC": "NCCL_API_MAGIC",
        "SLUICE_NCCL_UNDEFINED": "NCCL_CONFIG_UNDEF_INT",
    },
}
LIBRARIES = {
    "cublas": ("backend/gemm/cublas/cublas_symbols.inc", "nvidia/cu13/lib/libcublas.so.13"),
    "cublasLt": ("backend/gemm/cublas/cublaslt_symbols.inc", "nvidia/cu13/lib/libcublasLt.so.13"),
    "nccl": ("backend/comm/nccl/nccl_symbols.inc", "nvidia/nccl/lib/libnccl.so.2"),
    "nccl, registration": ("backend/comm/nccl/nccl_register_symbols.inc", "nvidia/nccl/lib/libnccl.so.2"),
}


def our_values(header):
    """Returns {name: expression} of the SLUICE_* enumerators and macros of a header."""
    text = (ROOT / header).read_text()
    found = dict(re.findall(r"^#define (SLUICE_NCCL_(?:MAGIC|UNDEFINED))\s+(\w+)", text, re.MULTILINE))
    found.update(re.findall(r"(SLUICE_(?:CU|CUBLAS|CUBLASLT|NCCL)_\w+) = (-?\w+)", text))
    return found


def values_lines():
    """Returns static assertions; every enumerator of Sluice must have the vendor's name here."""
    lines = []
    for header, names in VALUES.items():
        found = our_values(header)
        if set(found) != set(names):
            raise SystemExit(f"{header}: checked and declared values differ: {sorted(set(found) ^ set(names))}")
        lines += [f'static_assert((long long)({found[n]}) == (long long)({v}), "{n}");' for n, v in names.items()]
    # cuBLASLt writes its result into Sluice's struct.
    lines += [
        f"static_assert(offsetof(cublasLtMatmulHeuristicResult_t, {theirs}) == "
        f'offsetof(ours::sluice_cublaslt_result_t, {mine}), "{mine}");'
        for theirs, mine in (("algo", "algorithm"), ("workspaceSize", "workspace_bytes"), ("state", "state"))
    ]
    lines.append("static_assert(sizeof(cublasLtMatmulHeuristicResult_t) == sizeof(ours::sluice_cublaslt_result_t));")
    # The fields that Sluice sets have the same offsets as NCCL's.
    lines += [
        f'static_assert(offsetof(ncclConfig_t, {f}) == offsetof(ours::sluice_nccl_config_t, {f}), "{f}");'
        for f in ("size", "magic", "version", "blocking", "cgaClusterSize", "minCTAs", "maxCTAs")
    ]
    return lines


def symbols(table):
    text = re.sub(r"/\*.*?\*/", "", (ROOT / table).read_text(), flags=re.DOTALL)
    return re.findall(r"\b(cu[A-Z]\w+|cublas\w+|nccl[A-Z]\w+),\s*\(", text)


def install(folder):
    if (folder / "nvidia").is_dir():
        return
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", "--progress-bar", "off"]
    subprocess.run([*pip, "--no-deps", "--target", folder, "-r", HERE / "requirements.txt"], check=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / ".venv-vendor")
    folder = parser.parse_args().folder
    install(folder)
    passed = failed = 0

    def report(title, problem):
        nonlocal passed, failed
        passed, failed = passed + (not problem), failed + bool(problem)
        print(f"vendor: {'FAIL' if problem else 'ok  '}  {title}" + (f"\n{problem}" if problem else ""))

    generated = folder / "generated"
    generated.mkdir(exist_ok=True)
    (generated / "values.inc").write_text("\n".join(values_lines()) + "\n")
    includes = [generated, folder / "nvidia/cu13/include", folder / "nvidia/nccl/include"]
    command = ["g++", "-std=c++17", "-fsyntax-only", "-w", f"-I{ROOT}", *(f"-I{i}" for i in includes)]
    done = subprocess.run([*command, HERE / "prototypes.cc"], capture_output=True, text=True)
    errors = "\n".join(line for line in done.stderr.splitlines() if "error" in line)[:2000]
    count = sum(len(symbols(t)) for t in ("backend/device/cuda/cuda_symbols.inc", *(t for t, _ in LIBRARIES.values())))
    values = sum(len(names) for names in VALUES.values())
    report(
        f"{count} prototypes and {values} values as in cuda.h, cublas_v2.h, nccl.h", errors if done.returncode else ""
    )
    for name, (table, path) in LIBRARIES.items():
        try:
            # cuBLAS needs cuBLASLt.
            for other in sorted((folder / path).parent.glob("libcublasLt.so.*")):
                ctypes.CDLL(str(other), mode=ctypes.RTLD_GLOBAL)
            library = ctypes.CDLL(str(folder / path))
            missing = [symbol for symbol in symbols(table) if not hasattr(library, symbol)]
            report(f"{len(symbols(table))} symbols of {name}: {pathlib.Path(path).name}", ", ".join(missing))
        except OSError as error:
            report(f"symbols of {name}", str(error))
    print(f"vendor: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
