#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Rust examples into OUT: examples/rust/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
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
rustc --edition 2021 -O -D warnings --crate-type rlib "$bindings/rust/sluice.rs" --out-dir "$out"
for name in layer local pipeline; do
  rustc --edition 2021 -O -D warnings --extern sluice="$out/libsluice.rlib" "$name.rs" -o "$out/${name}_rust" -C link-arg="$lib/libsluice.so.0" -C link-arg=-Wl,-rpath,"$lib"
done
