"""Megatron-Core's MoE layer with its all-to-all dispatcher, and the same on Sluice, in turns, over shaped links.

    .venv/bin/python -m integration_tests.benchmarks.megatron_layer [--links 1gbit 0.4gbit 0.2gbit none] [--pairs 8]
        [--minutes 8] [--shapes layer layer5 mixtral qwen3 deepseek] [--dtypes bfloat16] [--records FOLDER] [--check]
        [--smoke]

Stock are `MoELayer`, `MoEAlltoAllTokenDispatcher` and `SequentialMLP` on gloo. `layer` is the shape of layer.py's eight
cases, where the DeepSpeed adapter has marks: here are the same for even loads. `layer5` has one expert with five times
the mean; stock pads nothing here, so that less is to be gained than over DeepSpeed's. --check: see beside.missed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from integration_tests.benchmarks.hosts import beside
from integration_tests.benchmarks.layer.cells import NAMED

_EVEN = {case.link: case.must_reach for case in NAMED if not case.drop and case.skew == 1}
_LAYER = {"M": 1024, "H": 4096, "E": 8, "K": 1, "gated": False}
_OUTER = ("1gbit", "0.2gbit")  # their links, unless links are named
# Those that take longest at the end: what time the others leave over is theirs.
SHAPES = {
    "deepseek": {"T": 256, "M": 1024, "H": 512, "E": 32, "K": 6, "gated": True, "skew": 1.0, "links": _OUTER},
    "qwen3": {"T": 256, "M": 1024, "H": 384, "E": 64, "K": 8, "gated": True, "skew": 1.0, "links": _OUTER},
    "mixtral": {"T": 512, "M": 1024, "H": 1792, "E": 8, "K": 2, "gated": True, "skew": 1.0, "links": _OUTER},
    "layer5": {"T": 1024, **_LAYER, "skew": 5.0, "links": _OUTER},
    "layer": {"T": 2048, **_LAYER, "skew": 1.0, "must_reach": _EVEN},
}
SMOKE = {"smoke": {"T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True, "skew": 1.0}}


if __name__ == "__main__":
    sys.exit(beside.main(__doc__, "megatron_layer_rank.py", "megatron", SHAPES, SMOKE))
