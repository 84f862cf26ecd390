# SPDX-License-Identifier: Apache-2.0
"""Lists the features that can be combined in a training by Sluice's schedules of torch.distributed.pipelining."""

from typing import Any

from pair_table import NOBODY, Rule, Table

FACTORS = {
    "name": ("sluice", "SluiceSingle"),
    "stages": ("one", "looped", "inv"),
    "policy": (
        *("adaptive", "1f1bhint", "backwardfirst", "messages", "1f1b", "gpipe"),
        *("zerobubble", "loopedorder", "v"),
    ),
    "split": ("splitauto", "split", "together"),
    "inflight": ("lauto", "l1", "l4"),
    "dtype": ("f32", "bf16", "autocast"),
    "dropout": ("nodropout", "dropout"),
    "frozen": ("trained", "fzlayer", "fzpart", "fzfirst", "fzlast"),
    "checkpointing": ("norepeat", "reentrant", "nonreentrant"),
    "modules": ("once", "twice"),
    "clipping": ("unclipped", "clip"),
    "accumulation": ("onebatch", "twobatches"),
    "scaling": ("scaled", "unscaled"),
    "optimizer": ("torchadam", "suboptim", "statefile"),
    "saving": ("unsaved", "saved"),
    "evaluating": ("unasked", "evaluated"),
}

_ONE = ("1f1b", "zerobubble", "1f1bhint")  # policies for one stage on a rank
RULES = (
    Rule({"name": "SluiceSingle", "stages": ("looped", "inv")}, "it holds 1 of 4 stages on 2 ranks"),
    Rule({"name": "SluiceSingle", "policy": ("v", "loopedorder")}, "virtual stages on a stage"),
    Rule({"policy": _ONE, "stages": ("looped", "inv")}, "needs 1 to 1 virtual stages on a stage"),
    Rule({"policy": "v", "stages": "one"}, "needs 2 to 2 virtual stages on a stage"),
    Rule({"policy": "v", "stages": "looped"}, "policy v needs it"),
    Rule({"policy": "loopedorder", "stages": "one"}, "needs 2 to 128 virtual stages on a stage"),
    Rule({"policy": "loopedorder", "stages": "inv"}, "policy looped needs placement 0"),
    Rule({"policy": ("1f1b", "1f1bhint", "gpipe"), "split": "split"}, "needs separate_wgrad = 0"),
    Rule({"policy": "loopedorder", "split": "split"}, "needs separate_wgrad = 0", given={"stages": "looped"}),
    Rule({"policy": "zerobubble", "split": "together"}, "needs separate_wgrad = 1"),
    Rule({"policy": "v", "split": "together"}, "needs separate_wgrad = 1", given={"stages": "inv"}),
    Rule({"policy": "zerobubble", "inflight": "l1"}, "zero_bubble has 2 micro-batches in flight on stage 0"),
    Rule({"policy": "gpipe", "inflight": ("l1", "l4")}, "gpipe has all 8 micro-batches in flight"),
    Rule({"policy": "v", "inflight": ("l1", "l4")}, "fixed numbers of micro-batches", given={"stages": "inv"}),
    Rule(
        {"policy": "loopedorder", "inflight": ("l1", "l4")}, "fixed number of micro-batches", given={"stages": "looped"}
    ),
    Rule({"checkpointing": "reentrant", "optimizer": "statefile"}, "parameter 0 of group 0 has no gradient"),
    Rule({"dropout": "dropout", "policy": ("v", "loopedorder")}, "the same", by=NOBODY),
    Rule({"dropout": "dropout", "stages": ("looped", "inv")}, "ranks draw for other blocks than stock's", by=NOBODY),
)
TABLE = Table(FACTORS, RULES, daily=9)


def options(row: dict[str, str]) -> dict[str, Any]:
    """Returns the keyword arguments of the schedule."""
    policies = {"1f1bhint": "1f1b_hint", "backwardfirst": "backward_first", "messages": "message_driven"}
    words = {**policies, "zerobubble": "zero_bubble", "loopedorder": "looped"}
    values = {
        "policy": words.get(row["policy"], row["policy"]),
        "separate_wgrad": {"splitauto": None, "split": True, "together": False}[row["split"]],
        "in_flight": {"lauto": None, "l1": 1, "l4": 4}[row["inflight"]],
    }
    return {name: value for name, value in values.items() if value is not None}
