# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's AutoEP layers, made of MoE blocks of transformers, and the same on Sluice, in turns, over shaped links.

On both sides `deepspeed.initialize` converts a model of one layer with an "expert_parallel" section. Experts run in a
loop. The router is the host's, with random weights.
"""

from integration_tests.benchmarks.hosts import compare
from integration_tests.benchmarks.measuring.bench import Bench

PAGE = "benchmarks/hosts.md"
SHAPES = {
    "deepseek": {"kind": "deepseek_v2", "T": 256, "M": 1024, "H": 512, "E": 32, "K": 6, "gated": True},
    "qwen3": {"kind": "qwen3_moe", "T": 256, "M": 1024, "H": 384, "E": 64, "K": 8, "gated": True},
    "mixtral": {"kind": "mixtral", "T": 512, "M": 1024, "H": 1792, "E": 8, "K": 2, "gated": True},
    "smoke": {"kind": "mixtral", "T": 24, "M": 32, "H": 16, "E": 4, "K": 2, "gated": True},
}
OPTIONS, SMOKE, tables = compare.options(SHAPES, "1gbit", "0.4gbit", "0.2gbit"), compare.SMOKE, compare.tables


def run(bench: Bench) -> list[str]:
    return compare.run(bench, "autoep_rank.py", SHAPES)
