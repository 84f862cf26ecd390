# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by bash. Sets what runs of the checkout's own virtual environment need. ROOT is the checkout.
ROOT="${ROOT:-$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)}"
export TORCHDYNAMO_DISABLE=1                              # no Inductor build of the gate's helpers in every worker
export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}"            # no probing, no warning; a GPU run sets it itself
export TORCH_EXTENSIONS_DIR="$ROOT/.venv/torch_extensions" # DeepSpeed's shm op, built once by setup.sh
export PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE # the modules of tests are compiled once
