# SPDX-License-Identifier: Apache-2.0
"""Lists the features that can be combined in a training of a Megatron-Core GPTModel whose spec is `with_sluice`'s."""

from typing import Any

from pair_table import NOBODY, STOCK, Rule, Table, layer_options

FACTORS = {
    "experts": ("gated", "plain", "biased", "shared"),
    "router": ("top2", "capacity", "sigmoid"),
    "dispatcher": ("alltoall", "allgather"),
    "ep": ("ep2", "ep1"),
    "dtype": ("f32", "bf16"),
    "recompute": ("norepeat", "moeagain", "allagain"),
    "ddp": ("ddp", "overlapped", "distributed"),
    "clipping": ("clip", "unclipped"),
    "micro": ("m2", "m1"),
    "frozen": ("trained", "fzlayer", "fzhalf", "fzrank", "fzrouter", "fzdense"),
    "moves": ("still", "byhand"),
    "saving": ("unsaved", "saved"),
    "chunks": ("nauto", "n1", "n3"),
    "policy": ("kept", "S1", "S2", "S3", "S4", "reuse"),
    "budget": ("nobudget", "budget"),
    "deduplicate": ("rows", "dedup", "node", "dedupauto"),
    "wire": ("wire32", "wire16", "wire8"),
    "transport": ("tcp", "c10d"),
    "chunking": ("cutauto", "tokens"),
    "grouping": ("grouped", "groupon", "groupoff"),
    "wgrad": ("wgradauto", "deferred", "perchunk"),
    "gradients": ("inplace", "autograd", "nopool"),
}

RULES = (
    Rule({"ddp": "distributed", "saving": "saved"}, "ShardedTensor.flattened_range is not supported", by=STOCK),
    Rule({"experts": "biased", "ep": "ep1"}, "is a view and is being modified inplace", by=STOCK),
    Rule({"ddp": "distributed", "moves": "byhand"}, "experts cannot move under DistributedOptimizer"),
    # A checkpoint stacks layers, but a frozen one has no optimizer state: "Invalid access pattern" on rank 0 only.
    Rule({"frozen": ("fzlayer", "fzrank"), "saving": "saved"}, "stock fails on one rank, the other waits", by=NOBODY),
    Rule({"frozen": "fzrank", "ep": "ep1"}, "copies of one expert, of which stock waits for one's gradient", by=NOBODY),
    Rule({"frozen": "fzrank", "moves": "byhand"}, "requires_grad belongs to the place: do not"),
)
TABLE = Table(FACTORS, RULES, daily=7)


def changes(row: dict[str, str]) -> dict[str, Any]:
    """Returns the fields of the TransformerConfig."""
    return {
        **{
            "gated": {},
            "plain": {"gated_linear_unit": False, "activation_func": "gelu"},
            "biased": {"add_bias_linear": True},
            "shared": {"moe_shared_expert_intermediate_size": 40},
        }[row["experts"]],
        **{
            "top2": {},
            "capacity": {"moe_expert_capacity_factor": 0.75},
            "sigmoid": {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        }[row["router"]],
        **{
            "norepeat": {},
            "moeagain": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
            "allagain": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        }[row["recompute"]],
        "moe_token_dispatcher_type": row["dispatcher"],
        "params_dtype": {"f32": "float32", "bf16": "bfloat16"}[row["dtype"]],
    }


def options(row: dict[str, str]) -> dict[str, Any]:
    """Returns the options of `with_sluice`."""
    return layer_options(row, gemm="host")
