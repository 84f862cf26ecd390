#!/usr/bin/env bash
# Builds the Rust examples into OUT: examples/rust/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's]
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
for name in layer local pipeline; do
  rustc --edition 2021 -O -D warnings "$name.rs" -o "$out/${name}_rust" -C link-arg="$lib/libsluice.so.0" -C link-arg=-Wl,-rpath,"$lib"
done
