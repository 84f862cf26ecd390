#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the suite with W processes under mpirun. Arguments: test binary, plugin, W, split length.
set -euo pipefail
binary=$1 plugin=$2 world_size=$3 split=$4

if ! command -v mpirun >/dev/null; then
  echo "SKIPPED: mpirun is not installed (Debian: apt-get install openmpi-bin libopenmpi-dev)"
  exit 0
fi
if [[ -n ${TSAN_OPTIONS:-} ]]; then
  echo "SKIPPED: Open MPI is not built for ThreadSanitizer, which would report its locks"
  exit 0
fi
# Open MPI keeps blocks until exit.
export ASAN_OPTIONS="${ASAN_OPTIONS:-}:detect_leaks=0"
# Open MPI's sockets need a short path, and HOME is unset in the sandbox.
TMPDIR=$(mktemp -d /tmp/sluice_mpi.XXXXXX)
export TMPDIR HOME=$TMPDIR
trap 'rm -rf "$TMPDIR"' EXIT
# Shared-memory files are named after the pid of mpirun, which may be the same in two sandboxes with one /dev/shm.
export OMPI_MCA_btl_vader_backing_directory=$TMPDIR
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1 OMPI_MCA_btl_base_warn_component_unused=0

# If a rank fails, mpirun ends all ranks; otherwise they would wait for their deadlines.
status=0
timeout 880 mpirun -np "$world_size" --oversubscribe --allow-run-as-root --bind-to none --tag-output \
  "$binary" "$plugin" "$split" || status=$?
if [[ $status == 77 ]]; then
  echo "SKIPPED: libsluice_mpi.so was built without Open MPI"
  exit 0
fi
exit $status
