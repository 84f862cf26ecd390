"""One rank of mg_ranks.MegatronRanks: as the transformers tests' worker, behind the CPU shim."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "transformers")]
from tf_rank_worker import main  # noqa: E402

if __name__ == "__main__":
    main(lambda: importlib.import_module("cpu_shim"))
