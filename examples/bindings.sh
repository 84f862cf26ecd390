# SPDX-License-Identifier: Apache-2.0
# Sourced by the build.sh of a language, with its arguments: OUT [FOLDER of libsluice.so.0] [FOLDER of the bindings].
# Changes to the folder of that script, and sets out, lib and bindings. Without a folder of libsluice.so.0, Bazel builds
# it. An installation has the bindings in share/sluice/bindings; without that argument they are generated into OUT.
out=$(realpath -m "${1:?usage: $0 OUT [FOLDER of libsluice.so.0]}") given=${2:+$(realpath "$2")} bindings=${3:+$(realpath "$3")} # of the caller's folder
cd "$(dirname "${BASH_SOURCE[1]}")"
lib=${given:-$(cd ../.. && bazel build --noshow_progress //capi:libsluice.so.0 >&2 && bazel info bazel-bin 2>/dev/null)/capi}
mkdir -p "$out"
if [ -z "$bindings" ]; then
  bindings=$out/bindings
  ../../.venv/bin/python ../../capi/bindings/generate.py --out "$bindings"
fi
