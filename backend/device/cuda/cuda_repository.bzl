# SPDX-License-Identifier: Apache-2.0
"""Finds what compiles the kernels: the compiler of CUDA 12.9, which set-up puts into .venv, else an nvcc.

@cuda//:nvcc.bzl says where. NVRTC is the folder of its libraries, NVRTC_PYTHON what runs kernels/nvrtc_fatbin.py. NVCC is
on PATH or in /usr/local/cuda. All are empty when there is none: the image of the kernels is then empty, and creating a
CUDA device says so. Runs again when the Bazel server starts, or when PATH or what tools/bazel found changes.
"""


def _cuda_repository_impl(ctx):
    root = ctx.path(Label("//:WORKSPACE")).dirname
    nvcc, nvrtc = "", ""
    if ctx.which("nvcc"):
        nvcc = ctx.which("nvcc")
    elif ctx.path("/usr/local/cuda/bin/nvcc").exists:
        nvcc = ctx.path("/usr/local/cuda/bin/nvcc")
    lib = root.get_child(".venv").get_child("lib")
    if lib.exists:
        for python in lib.readdir():
            folder = ctx.path(str(python) + "/site-packages/nvidia")
            if ctx.path(str(folder) + "/nvfatbin/lib/libnvfatbin.so.12").exists:
                nvrtc = folder
    ctx.file("BUILD", "")
    ctx.file("nvcc.bzl", 'NVCC = "%s"\nNVRTC = "%s"\nNVRTC_PYTHON = "%s/.venv/bin/python"\n' % (nvcc, nvrtc, root))


cuda_repository = repository_rule(
    implementation = _cuda_repository_impl, local = True, configure = True, environ = ["PATH", "SLUICE_FOUND"]
)
