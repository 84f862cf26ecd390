# SPDX-License-Identifier: Apache-2.0
"""Lists the features that can be combined in a training of DeepSpeed's pipeline engine whose batches Sluice runs."""

from typing import Any

from pair_table import NOBODY, STOCK, Rule, Table

FACTORS = {
    "zero": ("zero0", "zero1", "zero2"),
    "dtype": ("f32", "bf16", "autocast"),
    "model": ("blocks", "dropout", "tied", "experts"),
    "sizes": ("equal", "varied"),
    "clipping": ("unclipped", "clip"),
    "batches": ("m4", "m1", "m6"),
    "checkpointing": ("norepeat", "reentrant", "nonreentrant"),
    "frozen": ("trained", "fzlayer", "fzpart"),
    "moves": ("still", "byhand", "live"),
    "plan": ("asbuilt", "planned"),
    "policy": ("adaptive", "1f1b", "1f1bhint", "backwardfirst", "messages", "gpipe", "zerobubble"),
    "split": ("splitauto", "split", "together"),
    "inflight": ("lauto", "l1", "l4"),
    "optimizer": ("torchadam", "keyadam", "offload", "suboptim"),
    "saving": ("unsaved", "saved"),
    "evaluating": ("unasked", "evaluated"),
}

RULES = (
    Rule({"zero": "zero2"}, "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism", by=STOCK),
    Rule({"policy": ("1f1b", "1f1bhint", "gpipe"), "split": "split"}, "needs separate_wgrad = 0"),
    Rule({"policy": "zerobubble", "split": "together"}, "separate_wgrad"),
    Rule({"policy": "gpipe", "inflight": "l1", "batches": ("m4", "m6")}, "gpipe has all "),
    Rule({"policy": "gpipe", "inflight": "l4", "batches": "m6"}, "gpipe has all 6 micro-batches in flight"),
    Rule({"policy": "zerobubble", "inflight": "l1", "batches": ("m4", "m6")}, "zero_bubble has 2 micro-batches"),
    Rule({"moves": "live", "checkpointing": ("reentrant", "nonreentrant")}, "activation_checkpoint_interval is set"),
    Rule({"moves": "live", "split": "split"}, "weight gradients are separate ops, which cannot move with a layer"),
    Rule({"moves": "live", "policy": "zerobubble"}, "weight gradients are separate ops"),
    Rule({"moves": ("byhand", "live"), "optimizer": "offload", "zero": "zero1"}, "it is offloaded to host memory"),
    Rule(
        {"model": "experts", "frozen": "fzlayer", "moves": ("byhand", "live")},
        "a stage without trained experts has no group of experts",
    ),
    # Stock's bf16 optimizer without ZeRO cannot load the state that it has saved: KeyError: 0.
    Rule({"dtype": "bf16", "zero": "zero0", "saving": "saved"}, "0", by=STOCK),
    # Stock's reentrant form fails on one rank if a stage sends more than one tensor, and the other rank waits for it.
    Rule({"model": "experts", "checkpointing": "reentrant"}, "stock hangs", by=NOBODY),
    # With bf16 or ZeRO stock needs a group of trained experts on each stage, and one stage has none.
    Rule({"model": "experts", "frozen": "fzlayer"}, "stock fails on one rank, and the other waits", by=NOBODY),
    # DeepSpeed seeds a recomputed layer by the first layer of its stage (exec_func in its pipe/module.py).
    Rule(
        {"model": "dropout", "moves": ("byhand", "live"), "checkpointing": ("reentrant", "nonreentrant")},
        "stock itself draws others where a stage starts with another layer",
        by=NOBODY,
    ),
    Rule(
        {"model": "dropout", "plan": "planned", "checkpointing": ("reentrant", "nonreentrant")}, "the same", by=NOBODY
    ),
)
TABLE = Table(FACTORS, RULES, daily=8)


def options(row: dict[str, str]) -> dict[str, Any]:
    """Returns the "sluice" section of a row."""
    policies = {"1f1bhint": "1f1b_hint", "backwardfirst": "backward_first", "messages": "message_driven"}
    pipeline = {
        "policy": {**policies, "zerobubble": "zero_bubble"}.get(row["policy"], row["policy"]),
        "separate_wgrad": {"splitauto": None, "split": True, "together": False}[row["split"]],
        "in_flight": {"lauto": None, "l1": 1, "l4": 4}[row["inflight"]],
        "plan": "adaptive" if row["plan"] == "planned" else None,
    }
    optimizer = {"optimizer": True} if row["optimizer"] in ("keyadam", "offload") else {}
    return {"enabled": True, "timeout": 60, "pipeline": pipeline, **optimizer}
