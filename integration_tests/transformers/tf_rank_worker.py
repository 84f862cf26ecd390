# SPDX-License-Identifier: Apache-2.0
"""Runs one rank for tests of expert parallelism: the DeepSpeed tests' worker, without DeepSpeed."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "deepspeed")]
from rank_worker import main  # noqa: E402

if __name__ == "__main__":
    main()
