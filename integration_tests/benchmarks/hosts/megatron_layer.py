# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's MoE layer with its all-to-all dispatcher, and the same on Sluice, in turns, over shaped links.

Stock is `MoELayer` with `MoEAlltoAllTokenDispatcher` and `SequentialMLP` on gloo. `layer` is the shape of the eight
cases of the benchmark `layer`, whose marks for even loads apply here. In `layer5` one expert has five times the mean
load. Stock does not pad rows here, so the possible gain is smaller than over DeepSpeed's layer.
"""

from integration_tests.benchmarks.hosts import compare
from integration_tests.benchmarks.layer.cells import NAMED
from integration_tests.benchmarks.measuring.bench import Bench

PAGE = "benchmarks/hosts.md"
_EVEN = {case.link: case.must_reach for case in NAMED if not case.drop and case.skew == 1}
_LAYER = {"M": 1024, "H": 4096, "E": 8, "K": 1, "gated": False}
_GATED = {"gated": True, "skew": 1.0, "links": ("1gbit", "0.2gbit")}
# The longest cells come last, because they get the time that the others do not use.
SHAPES = {
    "deepseek": {"T": 256, "M": 1024, "H": 512, "E": 32, "K": 6, **_GATED},
    "qwen3": {"T": 256, "M": 1024, "H": 384, "E": 64, "K": 8, **_GATED},
    "mixtral": {"T": 512, "M": 1024, "H": 1792, "E": 8, "K": 2, **_GATED},
    "layer5": {"T": 1024, **_LAYER, "skew": 5.0, "links": ("1gbit", "0.2gbit")},
    "layer": {"T": 2048, **_LAYER, "skew": 1.0, "must_reach": _EVEN},
    "smoke": {"T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True, "skew": 1.0},
}
OPTIONS, SMOKE, tables = compare.options(SHAPES, "1gbit", "0.4gbit", "0.2gbit"), compare.SMOKE, compare.tables


def run(bench: Bench) -> list[str]:
    return compare.run(bench, "megatron_rank.py", SHAPES)
