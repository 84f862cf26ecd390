#!/usr/bin/env bash
# dump.sh LIBRARY OUT: writes the public ABI of a library that was built in this checkout with -g.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
abidw --suppressions "$here/public.supp" --exported-interfaces-only --no-corpus-path --no-comp-dir-path --no-show-locs \
  --type-id-style hash --out-file "$2" "$1"
