# SPDX-License-Identifier: Apache-2.0
"""Defines Sluice's build macros, with the compiler's flags and the form of C tests.

    load("//third_party/bazel:sluice.bzl", "sluice_cc_folder", "sluice_cc_library", "sluice_cc_tests")

Includes are relative to the workspace root: `#include "backend/base/status.h"`.
"""

# Warnings are errors in our own code only. -Wconversion is left out, because index arithmetic would need many casts;
# the checked arithmetic of backend/base covers sizes.
_WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wpointer-arith",
    "-Wundef",
    "-Wvla",
    "-Wwrite-strings",
    "-Wno-missing-field-initializers",
    "-Werror",
]

_C_ONLY = ["-std=c11", "-Wstrict-prototypes", "-Wmissing-prototypes", "-Wold-style-definition"]

# -D_GNU_SOURCE: -std=c11 hides POSIX. Hidden visibility: libsluice exports only SLUICE_API functions.
# -ffp-contract=off: results must not depend on fused operations. No -march: kernels are chosen at run time.
SLUICE_COPTS = [
    "-D_GNU_SOURCE",
    "-fvisibility=hidden",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
] + _WARNINGS

SLUICE_C_COPTS = _C_ONLY + SLUICE_COPTS

SLUICE_LINKOPTS = ["-pthread"]


def _is_cxx(name):
    return name.endswith(".cc") or name.endswith(".cpp") or name.endswith(".cxx")


def _copts(srcs):
    # A target is C or C++, never both: the C flags are errors for g++.
    for src in srcs:
        if _is_cxx(src):
            return SLUICE_COPTS
    return SLUICE_C_COPTS


# The timeouts of tests that hang. They are longer than those of Bazel's sizes, because a busy machine is slower.
_TIMEOUTS = {"small": "moderate", "medium": "long", "large": "eternal"}


def _own(name, suffix):
    """Returns the file of this name in the package or in its folder test, as a list."""
    return native.glob([name + suffix, "test/" + name + suffix])


def sluice_cc_library(name, srcs = None, hdrs = None, copts = [], linkopts = [], visibility = None, **kwargs):
    """Defines a static C library with the common flags, by default visible in its own package only.

    Without srcs and hdrs it has NAME.c and NAME.h, here or in the folder test; without NAME.c it groups its deps. A
    library may have only headers.
    """
    if srcs == None and hdrs == None:
        srcs = _own(name, ".c")
        hdrs = _own(name, ".h") if srcs else []
    native.cc_library(
        name = name,
        srcs = srcs or [],
        hdrs = hdrs or [],
        copts = _copts(srcs or []) + copts,
        linkopts = SLUICE_LINKOPTS + linkopts,
        linkstatic = 1,
        visibility = visibility or ["//visibility:private"],
        **kwargs,
    )


def sluice_cc_folder(name, private = [], exclude = [], **kwargs):
    """Defines a library of all sources and headers of a folder; other folders cannot include headers in `private`."""
    sluice_cc_library(
        name = name,
        srcs = native.glob(["*.c"], exclude = exclude) + private,
        hdrs = native.glob(["*.h"], exclude = private + exclude),
        **kwargs,
    )


def sluice_cc_test(name, srcs = None, deps = [], copts = [], linkopts = [], size = "small", cmocka = True, **kwargs):
    """Defines a cmocka test with a timeout: small 300 s, medium 900 s, large 1 h. cmocka = False: a plain program.

    Without srcs it has NAME.c, here or in the folder test; its cases are TESTs (test.h), which need no main. Results
    are text in the test's log, because cmocka's XML would not show failures or the case that hung there.
    """
    srcs = _own(name, ".c") if srcs == None else srcs
    if not srcs:
        fail("//%s has no %s.c, neither in the package nor in its folder test" % (native.package_name(), name))
    cxx = _copts(srcs) == SLUICE_COPTS
    native.cc_test(
        name = name,
        srcs = srcs,
        copts = _copts(srcs) + copts,
        linkopts = SLUICE_LINKOPTS
        + linkopts
        + ["-lm"]
        + select({
            "//third_party/bazel:symbols": [],
            "//conditions:default": ["-Wl,-S"],  # a fifth of the bytes, in half of the linker's time
        }),
        linkstatic = 1,
        size = size,
        timeout = _TIMEOUTS[size],
        deps = deps + ["//third_party/bazel:line_buffered"] + (["//backend/base:refused"] if cmocka and not cxx else []),
        **kwargs,
    )


def sluice_cc_tests(small = {}, medium = {}, large = {}, deps = []):
    """Defines the plain tests of a package by size, `{name: its additional deps}`; see sluice_cc_test."""
    for size, tests in {"small": small, "medium": medium, "large": large}.items():
        for name, own in tests.items():
            sluice_cc_test(name = name, size = size, deps = deps + own)


def sluice_fuzz_target(name, srcs, deps = [], linkopts = []):
    """Defines two programs with the same LLVMFuzzerTestOneInput; the folder corpus/NAME next to it has the corpus.

    NAME_fuzz is linked with clang's libFuzzer, and is built with --config=fuzz only: see third_party/fuzz/run.py.
    NAME_corpus_test is a normal test that runs it on every file of the corpus, and on prefixes of these files.
    """
    corpus = "corpus/" + name
    native.cc_binary(
        name = name + "_fuzz",
        testonly = 1,
        srcs = srcs,
        copts = SLUICE_C_COPTS,
        linkopts = SLUICE_LINKOPTS + linkopts + ["-fsanitize=fuzzer", "-lm"],
        tags = ["fuzz", "manual"],
        deps = deps + ["//third_party/fuzz:target"],
    )
    sluice_cc_test(
        name = name + "_corpus_test",
        size = "medium",
        srcs = srcs + ["//third_party/fuzz:replay.c"],
        args = [native.package_name() + "/" + corpus],
        data = native.glob([corpus + "/*"]),
        linkopts = linkopts,
        cmocka = False,
        deps = deps + ["//third_party/fuzz:target"],
    )
