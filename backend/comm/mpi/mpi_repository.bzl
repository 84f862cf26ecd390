"""Finds Open MPI through its compiler wrapper and offers it as @mpi//:mpi.

Without it the repository still exists: @mpi//:mpi then defines SLUICE_NO_MPI, libsluice_mpi.so is a stub that says so,
and the MPI tests skip aloud. Runs again when the Bazel server starts or PATH changes.
"""

_BUILD = """
cc_library(
    name = "mpi",
    hdrs = glob(["include*/**/*.h"], allow_empty = True),
    includes = {includes},
    defines = {defines},
    linkopts = {linkopts},
    visibility = ["//visibility:public"],
)
"""

def _words(ctx, mpicc, option):
    result = ctx.execute([mpicc, option])
    if result.return_code != 0:
        return None
    return [w for w in result.stdout.replace("\n", " ").split(" ") if w]

def _mpi_repository_impl(ctx):
    mpicc = ctx.which("mpicc.openmpi") or ctx.which("mpicc")
    dirs = _words(ctx, mpicc, "--showme:incdirs") if mpicc else None
    libs = _words(ctx, mpicc, "--showme:libs") if dirs else None
    libdirs = _words(ctx, mpicc, "--showme:libdirs") if libs else None
    if not libdirs or not [d for d in dirs if ctx.path(d + "/mpi.h").exists]:
        ctx.file("BUILD", _BUILD.format(includes = [], defines = ["SLUICE_NO_MPI"], linkopts = []))
        return
    includes = []
    for d in dirs:
        if ctx.path(d).exists:
            name = "include%d" % len(includes)
            ctx.symlink(d, name)
            includes.append(name)
    ctx.file("BUILD", _BUILD.format(
        includes = includes,
        defines = [],
        linkopts = ["-L" + d for d in libdirs] + ["-l" + l for l in libs],
    ))

mpi_repository = repository_rule(
    implementation = _mpi_repository_impl,
    local = True,
    configure = True,
    environ = ["PATH"],
)
