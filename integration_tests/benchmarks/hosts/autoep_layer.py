"""DeepSpeed's AutoEP layers, made of MoE blocks of transformers, and the same on Sluice, in turns, over shaped links.

    .venv/bin/python -m integration_tests.benchmarks.autoep_layer [--links 1gbit 0.4gbit 0.2gbit none] [--pairs 8]
        [--minutes 8] [--shapes mixtral qwen3 deepseek] [--dtypes bfloat16] [--records FOLDER] [--check] [--smoke]

Both sides are what `deepspeed.initialize` makes of a model of one layer with an "expert_parallel" section, experts
looped over. The router is the host's, with random weights. --check: see beside.missed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from integration_tests.benchmarks.hosts import beside

SHAPES = {
    "deepseek": {"kind": "deepseek_v2", "T": 256, "M": 1024, "H": 512, "E": 32, "K": 6, "gated": True},
    "qwen3": {"kind": "qwen3_moe", "T": 256, "M": 1024, "H": 384, "E": 64, "K": 8, "gated": True},
    "mixtral": {"kind": "mixtral", "T": 512, "M": 1024, "H": 1792, "E": 8, "K": 2, "gated": True},
}
SMOKE = {"smoke": {"kind": "mixtral", "T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True}}


if __name__ == "__main__":
    sys.exit(beside.main(__doc__, "autoep_layer_rank.py", "autoep", SHAPES, SMOKE))
