#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Fortran example into OUT: examples/fortran/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../bindings.sh"
# -std=f2018: what other compilers take too.
mpif90 -std=f2018 -O2 -Wall -Werror -J "$out" "$bindings/fortran/sluice.f90" mpi.f90 "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/mpi_fortran"
