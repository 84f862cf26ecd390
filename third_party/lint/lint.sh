#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Formatters and linters, all pinned. Prints `ok`/`FAIL` for each check; details of a failing one follow it.
#
#   third_party/lint/lint.sh [--fix] [--analyze] [PATH...]
#
# --fix      rewrites what the formatters can
# --analyze  also the path-sensitive checks of clang-tidy (seconds a file; part of ./test --full)
# PATH       only files below these
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"
fix=0 analyze=() only=()
for argument in "$@"; do
  case $argument in
    --fix) fix=1 ;;
    --analyze) analyze=(--analyze) ;;
    -*) echo "usage: $0 [--fix] [--analyze] [PATH...]" >&2 && exit 2 ;;
    *) only+=("${argument%/}") ;;
  esac
done

# Files that git tracks or would track: no build outputs and no .venv.
files() {
  local file prefix
  while IFS= read -r -d '' file; do
    [ -f "$file" ] || continue
    ((${#only[@]})) || printf '%s\0' "$file"
    for prefix in "${only[@]}"; do
      case $file in "$prefix" | "$prefix"/*) printf '%s\0' "$file" ;; esac
    done
  done < <(git ls-files -z --cached --others --exclude-standard -- "$@")
}
mapfile -d '' c_files < <(files '*.c' '*.h' '*.hpp' '*.cc' '*.cpp' '*.cu' '*.inc')
mapfile -d '' python_files < <(files '*.py')
mapfile -d '' bazel_files < <(files 'BUILD' '*/BUILD' 'WORKSPACE' '*/WORKSPACE' '*.bzl')
mapfile -d '' shell_files < <(files '*.sh' test quickstart .ci/run tools/bazel)

passed=0 failed=0
check() {
  local title=$1 out
  shift
  if out=$("$@" 2>&1); then
    passed=$((passed + 1))
    printf 'lint: ok    %s\n' "$title"
  else
    failed=$((failed + 1))
    printf 'lint: FAIL  %s\n%s\n' "$title" "$(head -n 40 <<<"$out")"
  fi
}

pinned_clang_format() {
  clang-format-14 --version | grep -q 'version 14\.' || {
    echo "clang-format-14 is not version 14"
    return 1
  }
  if ((fix)); then clang-format-14 -i -style=file "${c_files[@]}"; else clang-format-14 --dry-run -Werror -ferror-limit=3 -style=file "${c_files[@]}"; fi
}
ruff=.venv/bin/ruff
pinned_ruff() {
  local want
  want=$(sed -n 's/^ruff==//p' third_party/setup/requirements-test.txt)
  [ "$($ruff --version)" = "ruff $want" ] || {
    echo "ruff is not the pinned $want: run third_party/setup/setup.sh test"
    return 1
  }
}
ruff_check() {
  pinned_ruff
  if ((fix)); then $ruff check --quiet --fix "${python_files[@]}"; else $ruff check --quiet --output-format concise "${python_files[@]}"; fi
}
ruff_format() {
  if ((fix)); then $ruff format --quiet "${python_files[@]}"; else $ruff format --quiet --check "${python_files[@]}" || { $ruff format --check "${python_files[@]}"; return 1; }; fi
}
bazel_format() { if ((fix)); then .venv/bin/python third_party/lint/bazel_format.py --fix "${bazel_files[@]}"; else .venv/bin/python third_party/lint/bazel_format.py "${bazel_files[@]}"; fi; }
shell_syntax() {
  local file
  for file in "${shell_files[@]}"; do
    bash -n "$file" && head -n 13 "$file" | grep -qE 'set -euo? ?pipefail|set -eu|Sourced' || {
      echo "$file: does not parse, or lacks set -euo pipefail"
      return 1
    }
  done
}
spdx_lines() {
  local file
  for file in "${c_files[@]}" "${python_files[@]}" "${shell_files[@]}"; do
    head -n 2 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0' || echo "$file"
  done | sed 's/$/: has no line "SPDX-License-Identifier: Apache-2.0" at its top/' | grep . && return 1 || return 0
}
# A path of one machine, or the host of a package registry, has no place in a commit.
no_private_paths() {
  ! git grep -nIE '(^|[^A-Za-z0-9_./])/(work|root|home/[a-z]+)/|(pypi|pythonhosted)\.org|deb\.debian\.org|proxy\.golang' -- ':!third_party/lint/lint.sh' ':!docs/*'
}
((${#c_files[@]} == 0)) || check "C: clang-format 14 (${#c_files[@]} files)" pinned_clang_format
((${#c_files[@]} == 0)) || check "C: clang-tidy 14" .venv/bin/python third_party/lint/tidy.py "${analyze[@]}" "${only[@]}"
((${#python_files[@]} == 0)) || check "Python: ruff check (${#python_files[@]} files)" ruff_check
((${#python_files[@]} == 0)) || check "Python: ruff format" ruff_format
((${#bazel_files[@]} == 0)) || check "Bazel: format (${#bazel_files[@]} files)" bazel_format
((${#shell_files[@]} == 0)) || check "shell: syntax (${#shell_files[@]} files)" shell_syntax
check "SPDX line in every source file" spdx_lines
check "no paths of one machine, no registry hosts" no_private_paths
printf 'lint: %d passed, %d failed\n' "$passed" "$failed"
((failed == 0))
