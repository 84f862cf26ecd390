# SPDX-License-Identifier: Apache-2.0
"""Lists the features that can be combined in a training of DeepSpeed's `MoE`: options of the section, of the ds_config,
and of the model."""

from typing import Any

from pair_table import NOBODY, STOCK, Rule, Table, layer_options

FACTORS = {
    "zero": ("zero0", "zero1", "zero2"),
    "dtype": ("f32", "bf16", "autocast"),
    "experts": ("relu", "gated", "tuple"),
    "gate": ("top1", "top2", "nodrop", "noisy"),
    "ep": ("ep2", "ep1", "ep1and2"),
    "rows": ("allrows", "idle"),
    "clipping": ("unclipped", "clip"),
    "accumulation": ("onestep", "twosteps"),
    "checkpointing": ("norepeat", "reentrant", "nonreentrant", "hostrepeats"),
    "frozen": ("trained", "fzsome", "fzrank", "fzhalf", "fzlayer", "fzgate", "fzdense"),
    "moves": ("still", "byhand", "placed"),
    "optimizer": ("torchadam", "keyadam", "offload", "suboptim"),
    "saving": ("unsaved", "saved"),
    "chunks": ("nauto", "n1", "n3", "n64"),
    "policy": ("kept", "S1", "S2", "S3", "S4", "mixed", "reuse"),
    "budget": ("nobudget", "budget", "hostbudget", "nofit"),
    "deduplicate": ("rows", "dedup", "node", "dedupauto"),
    "wire": ("wire32", "wire16", "wire8"),
    "transport": ("tcp", "c10d"),
    "chunking": ("cutauto", "tokens"),
    "grouping": ("grouped", "groupon", "groupoff"),
    "wgrad": ("wgradauto", "deferred", "perchunk"),
    "gradients": ("inplace", "autograd", "nopool"),
    "unsupported": ("error", "warn"),
    "gemm": ("measured", "native", "ref", "host"),
}

RULES = (
    Rule({"policy": "mixed", "chunks": ("nauto", "n1", "n64")}, '"policy.input" names 3 chunks, and "chunks" is'),
    Rule(
        {"policy": ("S1", "S2"), "experts": "tuple", "unsupported": "error"},
        "is not possible with experts that run as the host's modules",
    ),
    Rule(
        {"policy": "mixed", "experts": "tuple", "unsupported": "error"},
        "they are recomputed in every chunk or in none",
        given={"chunks": "n3"},
    ),
    Rule({"budget": "nofit"}, "OVER_BUDGET: layer 0: no plan fits the memory budget of 65536 bytes"),
    Rule({"dtype": "autocast", "checkpointing": "hostrepeats"}, "BFloat16", by=STOCK),  # recomputed without autocast
    Rule({"frozen": ("fzsome", "fzrank"), "moves": "byhand"}, "requires_grad belongs to the place: do not"),
    Rule(
        {"frozen": "fzrank", "zero": ("zero1", "zero2")},
        "the optimizer gets no parameter of an expert, but ZeRO needs one",
        stock_hangs=True,
    ),
    Rule({"frozen": "fzrank", "dtype": "bf16"}, "no expert of rank 0 has a trainable parameter", stock_hangs=True),
    Rule({"frozen": "fzrank", "ep": ("ep1", "ep1and2")}, "copies of one expert, trained on one rank alone", by=NOBODY),
    Rule(
        {"moves": ("byhand", "placed"), "optimizer": "keyadam", "zero": "zero0", "dtype": "bf16"},
        "experts cannot move under FP16_Optimizer",
    ),
)
TABLE = Table(FACTORS, RULES, daily=8)


def options(row: dict[str, str]) -> dict[str, Any]:
    """Returns the "sluice" section of a row."""
    by_chunk = {"input": ["keep", "offload", "redispatch"], "pre_activation": ["recompute", "offload", "keep"]}
    more: dict[str, Any] = {
        "host_memory_budget": "1MiB" if row["budget"] == "hostbudget" else None,
        "on_unsupported": row["unsupported"],
        "gemm": None if row["gemm"] == "measured" else row["gemm"],
        "optimizer": True if row["optimizer"] in ("keyadam", "offload") else None,
    }
    if row["policy"] == "mixed":
        more["policy"] = by_chunk
    if row["budget"] in ("hostbudget", "nofit"):
        more["memory_budget"] = {"hostbudget": "20MiB", "nofit": "64KiB"}[row["budget"]]
    if row["moves"] == "placed":
        more["placement"] = {"interval": 1, "target": 1.0, "least_gain": 0.0, "horizon": 10**6}
    return {"enabled": True, "timeout": 60, **layer_options(row, **more)}
