#!/usr/bin/env bash
# Builds the Go example into OUT: examples/go/build.sh OUT [FOLDER of libsluice.so.0, default: Bazel's]
set -euo pipefail
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[0]}")"
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
ln -sf "$lib/libsluice.so.0" "$out/libsluice.so" # what -lsluice looks for, where no libsluice-dev is installed
export CGO_CFLAGS="-I$(cd ../../capi/include && pwd)" CGO_LDFLAGS="-L$out -Wl,-rpath,$lib"
go build -o "$out/local_go" .
