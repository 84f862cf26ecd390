#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Rust examples into OUT: examples/rust/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../bindings.sh"
rustc --edition 2021 -O -D warnings --crate-type rlib "$bindings/rust/sluice.rs" --out-dir "$out"
for name in local pipeline; do
  rustc --edition 2021 -O -D warnings --extern sluice="$out/libsluice.rlib" "$name.rs" -o "$out/${name}_rust" -C link-arg="$lib/libsluice.so.0" -C link-arg=-Wl,-rpath,"$lib"
done
