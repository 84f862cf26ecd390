#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs Sluice's daily tests of Megatron with the newest Megatron-Core of the package index. Failures are warnings, as
# this release is not supported; the exit status is 0. Run setup.sh before.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"
# shellcheck source=third_party/setup/env.sh
. third_party/setup/env.sh
folder=.venv/megatron-canary

warn() { # one line
  printf 'canary: WARNING: %s\n' "$*"
  exit 0
}

rm -rf "$folder"
.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-input --progress-bar off --no-deps \
  --ignore-requires-python --target "$folder" megatron-core || warn "the newest Megatron-Core cannot be installed"
version=$(basename "$folder"/megatron_core-*.dist-info .dist-info)
version=${version#megatron_core-}
if [ -d ".venv/megatron-$version" ]; then
  printf 'canary: the newest Megatron-Core, %s, is one of those that are supported\n' "$version"
  exit 0
fi
if SLUICE_MEGATRON_CANARY=canary .venv/bin/python -m pytest -q -k canary integration_tests/megatron; then
  printf 'canary: Megatron-Core %s, newer than what is supported, passes the tests\n' "$version"
else
  warn "Megatron-Core $version, newer than what is supported, fails: see above"
fi
