#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv-python3.X for each named Python, with torch and cffi, with which the wheel's test of that Python trains
# (python_plugin/packaging/test/interpreters_test.py). Interpreters are searched on PATH and in pyenv's folder. May be
# run repeatedly; `rm -r .venv-python3.X` frees the gigabytes.
#
#   third_party/setup/interpreters.sh [3.9 3.10 3.12 3.13]
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"
wanted=third_party/setup/requirements-interpreters.txt

interpreter() {
  local path
  for path in "$(command -v "python$1" || true)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/python; do
    # pyenv has shims for versions that are not installed.
    if [ -n "$path" ] && "$path" -c 'import venv, ensurepip' 2>/dev/null; then
      echo "$path"
      return 0
    fi
  done
  return 1
}

for version in "${@:-3.9 3.10 3.12 3.13}"; do
  for one in $version; do
    own=.venv-python$one
    path=$(interpreter "$one") || {
      echo "set-up: this machine has no Python $one" >&2
      continue
    }
    stamp_now=$({ "$path" -V && cat "$wanted"; } | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$own/.stamp" 2>/dev/null || true)" != "$stamp_now" ]; then
      rm -rf "$own"
      "$path" -m venv "$own"
      "$own/bin/python" -m pip --disable-pip-version-check install --no-input --quiet --progress-bar off -r "$wanted"
      echo "$stamp_now" >"$own/.stamp"
    fi
    "$own/bin/python" -c 'import sys, torch; print("set-up:", sys.prefix.rpartition("/")[2], "has torch", torch.__version__)'
  done
done
