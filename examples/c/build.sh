#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the C examples into OUT: examples/c/build.sh OUT [FOLDER of libsluice.so.0, default: the installed one or Bazel's]
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
include=../../capi/include
if [ ! -d "$include" ]; then # installed, in PREFIX/share/sluice/examples/c
  include=$(realpath ../../../../include)
  for folder in ../../../../lib ../../../../lib/*-linux-gnu; do
    [ ! -e "$folder/libsluice.so.0" ] || given=${given:-$(realpath "$folder")}
  done
fi
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
flags=(-std=c99 -O2 -Wall -Wextra -Werror -I "$include")
gcc "${flags[@]}" layer.c -o "$out/layer" -ldl -lm # not linked with the library: it is loaded by name
gcc "${flags[@]}" local4.c rank.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/local4" -pthread -lm
gcc "${flags[@]}" tcp.c rank.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/tcp" -lm
gcc "${flags[@]}" pipeline4.c stage.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/pipeline4" -pthread -lm
gcc "${flags[@]}" moving.c moving_layer.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/moving" -pthread
gcc "${flags[@]}" stashing.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/stashing" -pthread -lm
gcc "${flags[@]}" stages.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/stages"
if command -v mpicc >/dev/null; then
  mpicc "${flags[@]}" mpi.c rank.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/mpi" -lm
  mpicc "${flags[@]}" pipeline_mpi.c stage.c "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/pipeline_mpi" -lm
else
  echo "no mpicc here: mpi.c and pipeline_mpi.c are not built" >&2
fi
