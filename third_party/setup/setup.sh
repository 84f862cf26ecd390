#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Sets up this checkout: Debian packages by name, then .venv with pinned Python packages. May be run repeatedly.
#
#   third_party/setup/setup.sh quickstart|test|archive
#
# archive: only the packages of capi/packaging/make.py, without .venv.
#
# Everything but the Debian packages stays inside the checkout; the machine's own Python is only read.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
HERE=$ROOT/third_party/setup
LOG=$ROOT/.setup.log
PROFILE=${1:-test}
case $PROFILE in quickstart | test | archive) ;; *) echo "usage: $0 quickstart|test|archive" >&2 && exit 2 ;; esac
cd "$ROOT"
# shellcheck source=third_party/setup/env.sh
. "$HERE/env.sh"
export LC_ALL=C DEBIAN_FRONTEND=noninteractive

say() { printf 'setup: %s\n' "$*"; }
fail() { # one line: what failed, what to do
  printf 'setup: FAILED: %s\n' "$*" >&2
  exit 1
}

# try_once TITLE COMMAND...: output to the log, and a line every 15 s; the command's exit status.
try_once() {
  local title=$1 began=$SECONDS rc=0 pid last
  shift
  printf '\n== %s: %s\n' "$(date '+%F %T')" "$*" >>"$LOG"
  "$@" >>"$LOG" 2>&1 </dev/null &
  pid=$!
  local next=15
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.5
    if ((SECONDS - began >= next)); then
      last=$(tail -c 600 "$LOG" | tr '\r' '\n' | grep -v '^[[:space:]]*$' | tail -n 1 | cut -c1-80 || true)
      say "  $title: $((SECONDS - began)) s, at: $last"
      next=$((next + 15))
    fi
  done
  wait "$pid" || rc=$?
  return "$rc"
}

# step TITLE HINT COMMAND...: prints a line at the start, and one with the time at the end; on failure, the last output.
step() {
  local title=$1 hint=$2 began=$SECONDS rc=0
  shift 2
  say "$title ..."
  try_once "$title" "$@" || rc=$?
  if ((rc != 0)); then
    say "$title: the end of its output (.setup.log has all of it):"
    tail -n 15 "$LOG" | cut -c1-300 | sed 's/^/setup: | /'
    fail "$title (exit $rc after $((SECONDS - began)) s): $hint; details: tail -n 30 .setup.log"
  fi
  say "$title: done in $((SECONDS - began)) s"
}

# again COMMAND...: tries up to three times, as downloads may fail. After a failure pip does not use its cache.
again() {
  local try rc
  for try in 1 2 3; do
    rc=0
    "$@" || rc=$?
    ((rc != 0 && try < 3)) || return "$rc"
    export PIP_NO_CACHE_DIR=1
    printf 'exit %d, try %d of 3 follows in %d s\n' "$rc" $((try + 1)) $((try * 10))
    sleep $((try * 10))
  done
}

# One set-up at a time per checkout, and none while another writes .venv.
exec 9>"$ROOT/.setup.lock"
if command -v flock >/dev/null && ! flock -n 9; then
  say "another set-up of this checkout is running, waiting for it"
  flock -w 1200 9 || fail "another set-up of this checkout has run for 20 minutes: end it, then run this again"
fi
: >>"$LOG"
[ "$(wc -c <"$LOG")" -lt 4000000 ] || : >"$LOG"

# --- a Python to make .venv from -------------------------------------------------------------------------------
python_works() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }
find_python() {
  local p
  for p in "${SLUICE_PYTHON:-}" python3 /usr/bin/python3 python3.13 python3.12 python3.11 python3.10; do
    if [ -n "$p" ] && command -v "$p" >/dev/null && python_works "$p"; then
      command -v "$p"
      return 0
    fi
  done
  return 1
}
python_header() { "$1" -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; }

# --- Debian packages --------------------------------------------------------------------------------------------
wanted() {
  local python
  sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$HERE/packages.quickstart.txt"
  [ "$PROFILE" = quickstart ] || sed -e 's/#.*//' -e '/^[[:space:]]*$/d' "$HERE/packages.$PROFILE.txt"
  [ "$PROFILE" != test ] || command -v rustc >/dev/null || echo rustc
  if python=$(find_python); then
    python_header "$python" || echo python3-dev # DeepSpeed compiles one small extension
  else
    printf '%s\n' python3 python3-venv python3-dev
  fi
}
missing_packages() {
  local name
  while read -r name; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null || true)" = installed ] || printf '%s ' "$name"
  done < <(wanted)
}

if command -v dpkg-query >/dev/null && command -v apt-get >/dev/null; then
  missing=$(missing_packages)
  if [ -n "$missing" ]; then
    read -r -a names <<<"$missing"
    as_root=()
    if [ "$(id -u)" -ne 0 ]; then
      if command -v sudo >/dev/null && { sudo -n true 2>/dev/null || { [ -t 0 ] && sudo -v; }; }; then
        as_root=(sudo env DEBIAN_FRONTEND=noninteractive)
      else
        fail "Debian packages are missing and this user may not install them: ask an administrator for: apt-get install ${names[*]}"
      fi
    fi
    say "Debian packages to install (${#names[@]}): ${names[*]}"
    step "apt-get update" "check the network and the apt sources" \
      again "${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 update
    step "apt-get install of ${#names[@]} packages" "run it by hand: apt-get install ${names[*]}" \
      again "${as_root[@]}" apt-get -o DPkg::Lock::Timeout=300 install -y --no-install-recommends "${names[@]}"
    missing=$(missing_packages)
    [ -z "$missing" ] || fail "apt-get reported success, but these are still missing: $missing"
  fi
else
  lacking=
  for tool in bazel gcc g++ git ip; do command -v "$tool" >/dev/null || lacking+=" $tool"; done
  [ -z "$lacking" ] || fail "this is no Debian system, and these commands are missing:$lacking; install them by hand, then run this again"
fi

if [ "$PROFILE" = archive ]; then
  say "ready ($PROFILE, $SECONDS s): python3 capi/packaging/make.py"
  exit
fi

# --- .venv ------------------------------------------------------------------------------------------------------
PYTHON=$(find_python) || fail "no Python of 3.10 or later with venv found: install python3 and python3-venv, or set SLUICE_PYTHON"
requirement_files=("$HERE/requirements-torch.txt" "$HERE/requirements.txt")
[ "$PROFILE" = quickstart ] || requirement_files+=("$HERE/requirements-test.txt")

if ! .venv/bin/python -c 'import pip' >/dev/null 2>&1; then
  rm -rf .venv
  step "virtual environment .venv from $("$PYTHON" -V)" "remove .venv and try again" "$PYTHON" -m venv .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check install --no-input --progress-bar off)
stamp_now=$({ .venv/bin/python -V && cat "${requirement_files[@]}"; } | sha256sum | cut -d' ' -f1)
stamp_file=.venv/.sluice-$PROFILE.stamp
if [ "$(cat "$stamp_file" 2>/dev/null || true)" != "$stamp_now" ]; then
  rm -f .venv/.sluice-*.stamp
  pip_hint="check the network and the disk (df -h .), then run this again"
  step "PyTorch ($(grep ^torch= "$HERE/requirements-torch.txt"))" "$pip_hint" \
    again "${pip[@]}" -r "$HERE/requirements-torch.txt"
  rest=()
  for file in "${requirement_files[@]:1}"; do rest+=(-r "$file"); done
  # DeepSpeed is a source package; its setup.py imports torch only to prebuild ops, which are not used.
  step "Python packages (pinned)" "$pip_hint" again env DS_BUILD_OPS=0 "${pip[@]}" "${rest[@]}"
  echo "$stamp_now" >"$stamp_file"
  [ "$PROFILE" = quickstart ] || {
    { .venv/bin/python -V && cat "${requirement_files[@]:0:2}"; } | sha256sum | cut -d' ' -f1 >.venv/.sluice-quickstart.stamp
  }
fi

# --- packages in folders of their own ----------------------------------------------------------------------------
# Tests put them on the path: releases of Megatron-Core in addition to the oldest, which .venv has, and TRL.
into() { # into NAME TITLE PACKAGE...: once, into .venv/NAME
  local folder=.venv/$1
  [ ! -d "$folder" ] || return 0
  rm -rf "$folder.part"
  step "$2" "check the network, then run this again" \
    again "${pip[@]}" --no-deps --ignore-requires-python --target "$folder.part" "${@:3}"
  mv "$folder.part" "$folder"
}
if [ "$PROFILE" = test ]; then
  for wanted in $(grep '^megatron-core==' "$HERE/requirements-megatron.txt"); do
    into "megatron-${wanted##*==}" "Megatron-Core (${wanted##*==})" "$wanted"
  done
  trl=$(grep '^trl==' "$HERE/requirements-trl.txt")
  if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    into "trl-${trl##*==}" "TRL (${trl##*==}, 70 MB)" -r "$HERE/requirements-trl.txt"
  fi
fi

# --- the compiler of the kernels --------------------------------------------------------------------------------
# backend/device/cuda/cuda_repository.bzl prefers it, as a machine's own nvcc may have a CUDA that needs newer drivers.
if [ "$PROFILE" = test ] && ! ls .venv/lib/python3*/site-packages/nvidia/{nvfatbin/lib/libnvfatbin.so.12,cu13/bin/nvdisasm} \
  >/dev/null 2>&1; then
  step "the compiler of CUDA 12.9 and a disassembler (95 MB)" "check the network, then run this again" \
    again "${pip[@]}" --no-deps -r "$HERE/requirements-nvrtc.txt"
fi

# --- DeepSpeed's shared-memory op ------------------------------------------------------------------------------
# The first init_distributed compiles it in every rank at once, and a killed build leaves a lock on which later runs
# wait forever. So it is built here, once, after such locks are removed.
if ! ls "$TORCH_EXTENSIONS_DIR"/deepspeed_shm_comm/*.so >/dev/null 2>&1; then
  mkdir -p "$TORCH_EXTENSIONS_DIR"
  find "$TORCH_EXTENSIONS_DIR" -name lock -delete
  step "DeepSpeed's shared-memory op (compiled once)" "see whether g++ works and memory is left, then run this again" \
    env PATH="$ROOT/.venv/bin:$PATH" MAX_JOBS=2 .venv/bin/python -c '
from deepspeed.accelerator import get_accelerator
get_accelerator().create_op_builder("ShareMemCommBuilder").load()'
else
  find "$TORCH_EXTENSIONS_DIR" -name lock -mmin +10 -delete
fi
say "ready ($PROFILE, $SECONDS s): .venv has $(.venv/bin/python -V)"
