"""Finds nvcc: on PATH, in /usr/local/cuda, or in .venv, where set-up puts it on a machine that has none.

@cuda//:nvcc.bzl says where (NVCC, empty when there is none: the image of the kernels is then empty, and creating a CUDA
device says so). Runs again when the Bazel server starts, or when PATH or what tools/bazel found changes.
"""


def _cuda_repository_impl(ctx):
    root = ctx.path(Label("//:WORKSPACE")).dirname
    found = []
    if ctx.which("nvcc"):
        found.append(ctx.which("nvcc"))
    if ctx.path("/usr/local/cuda/bin/nvcc").exists:
        found.append(ctx.path("/usr/local/cuda/bin/nvcc"))
    lib = root.get_child(".venv").get_child("lib")
    if lib.exists:
        for python in lib.readdir():
            nvcc = ctx.path(str(python) + "/site-packages/nvidia/cu13/bin/nvcc")
            if nvcc.exists:
                found.append(nvcc)
    ctx.file("BUILD", "")
    ctx.file("nvcc.bzl", 'NVCC = "%s"\n' % (found[0] if found else ""))


cuda_repository = repository_rule(
    implementation = _cuda_repository_impl,
    local = True,
    configure = True,
    environ = [
        "PATH",
        "SLUICE_FOUND",
    ],
)
