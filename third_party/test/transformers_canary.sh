#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Finds tests of Sluice that break with the newest transformers, accelerate and peft of the package index:
#   third_party/test/transformers_canary.sh [PACKAGE[==VERSION] ...] [-- PYTEST_OPTION ...]
# Installs the packages (default: those three) into a scratch environment that takes all others from .venv, with torch,
# against which Sluice's adapters are compiled, and runs integration_tests/transformers there. Tests that fail run again
# there, and with the pinned releases. Exit status: 0 no test broke, 1 some broke, 2 the packages cannot be tried.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"
# shellcheck source=third_party/setup/env.sh
. third_party/setup/env.sh
pinned=.venv/bin/python folder=.venv/transformers-canary
newest=$folder/bin/python packages=()
while (($#)) && [ "$1" != -- ]; do
  packages+=("$1")
  shift
done
[ $# = 0 ] || shift
((${#packages[@]})) || packages=(transformers accelerate peft)

rm -rf "$folder"
"$pinned" -m venv "$folder"
where='import sysconfig; print(sysconfig.get_path("purelib"))'
printf 'import site; site.addsitedir("%s")\n' "$("$pinned" -c "$where")" >"$("$newest" -c "$where")/pinned.pth"
"$newest" -m pip --disable-pip-version-check install --quiet --no-input --progress-bar off --upgrade "${packages[@]}" || exit 2
versions='import importlib.metadata as m, sys; print(*(f"{name} {m.version(name)}" for name in sys.argv[1:]))'
for python in "$newest" "$pinned"; do
  printf 'canary: %s has %s\n' "$python" "$("$python" -c "$versions" "${packages[@]%%==*}")"
done

failures_of() { # PYTHON PYTEST_ARGUMENTS...; prints the tests that fail, and pytest's output to stderr
  local rc=0
  "$1" -m pytest -q --continue-on-collection-errors "${@:2}" >"$folder/log" || rc=$?
  cat "$folder/log" >&2
  ((rc < 2)) || return 2
  sed -n -E 's/^(FAILED|ERROR) (.*)/\2/p' "$folder/log" | sed 's/ - .*//' | sort
}

suite=integration_tests/transformers
known=$("$pinned" -m pytest -q --collect-only "$suite" | sed -n '/::/{p;s/::.*//p}' | sort -u) # tests and their files
first=$(failures_of "$newest" "$suite" "$@")
first=$(comm -12 <(printf '%s\n' "$first") <(printf '%s\n' "$known"))
[ -n "$first" ] || exit 0
mapfile -t failed <<<"$first"
again=$(failures_of "$newest" "${failed[@]}")
before=$(failures_of "$pinned" "${failed[@]}")
broken=$(comm -23 <(printf '%s\n' "$again") <(printf '%s\n' "$before"))
printf 'canary: tests that pass only with the pinned releases:\n%s\n' "${broken:-none}"
[ -z "$broken" ]
