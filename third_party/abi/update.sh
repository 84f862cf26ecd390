#!/usr/bin/env bash
# Shows how the ABI of libsluice.so.0 differs from the committed baseline and writes the new baseline.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
baseline=capi/abi/baseline.abi
bazel build --noshow_progress //capi:libsluice.so.0
library=$(bazel info bazel-bin 2>/dev/null)/capi/libsluice.so.0
new=$(mktemp)
trap 'rm -f "$new"' EXIT
third_party/abi/dump.sh "$library" "$new"
if [ -f "$baseline" ]; then
  rc=0
  abidiff "$baseline" "$new" || rc=$?
  ((rc & 3)) && echo "abidiff failed" && exit 1
  ((rc & 8)) && echo "INCOMPATIBLE: before 1.0 say so in CHANGELOG.md; from 1.0 on it takes a new SONAME"
fi
cp "$new" "$baseline"
echo "wrote $baseline ($(wc -c <"$baseline") bytes)"
