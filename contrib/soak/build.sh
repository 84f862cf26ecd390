#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the ranks of the soak into OUT: contrib/soak/build.sh OUT FOLDER_OF_LIBSLUICE
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT FOLDER}") lib=$(realpath "${2:?usage: $0 OUT FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p "$out"
flags=(-std=gnu11 -O2 -g -Wall -Wextra -Werror -D_GNU_SOURCE -I ../../capi/include -I ../..)
libraries=("$lib/libsluice.so.0" -Wl,-rpath,"$lib" -lm)
gcc "${flags[@]}" ../../capi/test/migration/mesh.c trainer.c rank.c "${libraries[@]}" -o "$out/rank"
if command -v mpicc >/dev/null; then
  mpicc "${flags[@]}" trainer.c rank_mpi.c "${libraries[@]}" -o "$out/rank_mpi"
fi
