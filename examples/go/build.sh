#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Go example into OUT: examples/go/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
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
ln -sf "$lib/libsluice.so.0" "$out/libsluice.so" # what -lsluice looks for, where no libsluice-dev is installed
export CGO_CFLAGS="-I$(cd ../../capi/include && pwd)" CGO_LDFLAGS="-L$out -Wl,-rpath,$lib"
printf 'go 1.19\n\nuse (\n\t"%s"\n\t"%s"\n)\n' "$PWD" "$bindings/go" >"$out/go.work" # go.mod needs no path then
GOWORK="$out/go.work" go build -o "$out/local_go" .
