#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Fortran examples into OUT: examples/fortran/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
# An installation has the bindings in share/sluice/bindings; without that argument they are generated into OUT.
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} bindings=${3:+$(realpath "$3")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
if [ -z "$bindings" ]; then
  bindings=$out/bindings
  ../../.venv/bin/python ../../capi/bindings/generate.py --out "$bindings"
fi
# -std=f2018: what other compilers take too.
flags=(-std=f2018 -O2 -Wall -Werror -J "$out" "$bindings/fortran/sluice.f90")
gfortran "${flags[@]}" layer.f90 "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/layer_fortran"
if command -v mpif90 >/dev/null; then
  mpif90 "${flags[@]}" mpi.f90 "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/mpi_fortran"
else
  echo "no mpif90 here: mpi.f90 is not built" >&2
fi
