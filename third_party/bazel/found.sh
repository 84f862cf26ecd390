#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Prints the files that @mpi and @cuda search for and that exist on this machine, one per line, with size and time. So
# the text changes when one of them is installed, replaced or removed. Takes milliseconds and writes nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

look() { # PATH...
  local path
  for path in "$@"; do
    [ ! -e "$path" ] || stat --dereference --format='%n %s %Y' "$path"
  done
}

for name in mpicc.openmpi mpicc nvcc; do
  ! path=$(type -P "$name") || look "$path"
done
# The wrapper may be installed without the headers.
if mpicc=$(type -P mpicc.openmpi || type -P mpicc); then
  for folder in $("$mpicc" --showme:incdirs 2>/dev/null || true); do look "$folder/mpi.h"; done
fi
look /usr/local/cuda/bin/nvcc .venv/lib/*/site-packages/nvidia/nvfatbin/lib/libnvfatbin.so.12
