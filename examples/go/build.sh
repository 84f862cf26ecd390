#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Builds the Go example into OUT: examples/go/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's] [FOLDER of the bindings]
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../bindings.sh"
ln -sf "$lib/libsluice.so.0" "$out/libsluice.so" # what -lsluice looks for, where no libsluice-dev is installed
export CGO_CFLAGS="-I$(cd ../../capi/include && pwd)" CGO_LDFLAGS="-L$out -Wl,-rpath,$lib"
printf 'go 1.19\n\nuse (\n\t"%s"\n\t"%s"\n)\n' "$PWD" "$bindings/go" >"$out/go.work" # go.mod needs no path then
GOWORK="$out/go.work" go build -o "$out/local_go" .
