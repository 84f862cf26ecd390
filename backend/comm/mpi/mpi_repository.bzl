# SPDX-License-Identifier: Apache-2.0
"""Finds Open MPI through its compiler wrapper and offers it as @mpi//:mpi.

Without it the repository still exists: @mpi//:mpi then defines SLUICE_NO_MPI, libsluice_mpi.so is a stub that says so,
and the MPI tests skip aloud. Runs again when the Bazel server starts, or when PATH or what tools/bazel found changes.
"""

_WITHOUT = """
cc_library(
    name = "mpi",
    defines = ["SLUICE_NO_MPI"],
    visibility = ["//visibility:public"],
)
"""

# The headers are copied to bazel-out, where clang-tidy finds them too.
_WITH = """
genrule(
    name = "copy",
    srcs = {sources},
    outs = {headers},
    cmd = "cp -L $(SRCS) $(RULEDIR)/include/",
)

cc_library(
    name = "mpi",
    hdrs = {headers},
    includes = ["include"],
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""


def _words(ctx, mpicc, option):
    result = ctx.execute([mpicc, option])
    return [w for w in result.stdout.replace("\n", " ").split(" ") if w] if result.return_code == 0 else []


def _mpi_repository_impl(ctx):
    mpicc = ctx.which("mpicc.openmpi") or ctx.which("mpicc")
    includes = [d for d in (_words(ctx, mpicc, "--showme:incdirs") if mpicc else []) if ctx.path(d + "/mpi.h").exists]
    if not includes:
        ctx.file("BUILD", _WITHOUT)
        return
    headers = [h for h in ["mpi.h", "mpi_portable_platform.h"] if ctx.path(includes[0] + "/" + h).exists]
    for header in headers:
        ctx.symlink(includes[0] + "/" + header, "installed/" + header)
    ctx.file(
        "BUILD",
        _WITH.format(
            sources = ["installed/" + header for header in headers],
            headers = ["include/" + header for header in headers],
            linkopts = ["-L" + d for d in _words(ctx, mpicc, "--showme:libdirs")]
            + ["-l" + l for l in _words(ctx, mpicc, "--showme:libs")],
        ),
    )


mpi_repository = repository_rule(
    implementation = _mpi_repository_impl, local = True, configure = True, environ = ["PATH", "SLUICE_FOUND"]
)
