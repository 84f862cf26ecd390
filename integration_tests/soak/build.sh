#!/usr/bin/env bash
# Builds the rank of the soak into OUT: integration_tests/soak/build.sh OUT FOLDER_OF_LIBSLUICE
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT FOLDER}") lib=$(realpath "${2:?usage: $0 OUT FOLDER}")
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p "$out"
gcc -std=gnu11 -O2 -g -Wall -Wextra -Werror -I ../../capi/include mesh.c rank.c "$lib/libsluice.so.0" \
  -Wl,-rpath,"$lib" -o "$out/rank" -lm
