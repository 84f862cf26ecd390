#!/usr/bin/env bash
# Builds the Fortran example into OUT: examples/fortran/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's]
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
# -std=f2018: what other compilers take too.
gfortran -std=f2018 -O2 -Wall -Werror -J "$out" sluice.f90 layer.f90 "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/layer_fortran"
