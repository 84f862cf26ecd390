#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv-oldest-host: the pinned oldest DeepSpeed, and all other packages from .venv (torch, pytest, sluice). Run
# setup.sh before. The script may be run repeatedly.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$ROOT"
# shellcheck source=third_party/setup/env.sh
. third_party/setup/env.sh
wanted=third_party/setup/requirements-oldest-host.txt
own=.venv-oldest-host

stamp_now=$({ .venv/bin/python -V && cat "$wanted" "${BASH_SOURCE[0]}"; } | sha256sum | cut -d' ' -f1)
if [ "$(cat "$own/.stamp" 2>/dev/null || true)" != "$stamp_now" ]; then
  rm -rf "$own"
  .venv/bin/python -m venv --without-pip "$own"
  # The setup.py of the source package imports torch, so it is built with .venv; DS_BUILD_OPS=0: no op is prebuilt.
  pip=(.venv/bin/python -m pip --disable-pip-version-check)
  DS_BUILD_OPS=0 "${pip[@]}" wheel --progress-bar off --no-deps --no-build-isolation -w "$own/wheels" -r "$wanted"
  "${pip[@]}" --python "$own/bin/python" install --no-input --no-deps --no-index -f "$own/wheels" -r "$wanted"
  # .venv follows its own packages on the path, added only now, so that pip sees none of them.
  packages=$("$own/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  .venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >"$packages/venv.pth"
  echo "$stamp_now" >"$own/.stamp"
fi
"$own/bin/python" -c '
import importlib.metadata, sys
found = {name: importlib.metadata.version(name) for name in ("deepspeed", "torch", "sluice")}
print("set-up:", sys.prefix.rpartition("/")[2], "has", ", ".join(" ".join(item) for item in found.items()))'
