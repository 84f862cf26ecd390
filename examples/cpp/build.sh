#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the C++ example into OUT: examples/cpp/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's]
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
../../.venv/bin/python ../../capi/bindings/generate.py --out "$out/bindings" # an installation has sluice.hpp with the headers
flags=(-std=c++11 -O2 -Wall -Wextra -Werror -I "$out/bindings/cpp" -I ../../capi/include -pthread)
g++ "${flags[@]}" local.cc "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/local_cpp"
