#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the C++ example into OUT: examples/cpp/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../bindings.sh"
flags=(-std=c++11 -O2 -Wall -Wextra -Werror -I "$bindings/cpp" -I ../../capi/include -pthread)
g++ "${flags[@]}" local.cc "$lib/libsluice.so.0" -Wl,-rpath,"$lib" -o "$out/local_cpp"
