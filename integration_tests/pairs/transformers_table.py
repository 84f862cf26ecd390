# SPDX-License-Identifier: Apache-2.0
"""Lists the features that can be combined in a training of a transformers model whose experts are distributed by
`ep_implementation="sluice"`."""

from typing import Any

from pair_table import Rule, Table, layer_options

FACTORS = {
    "layout": ("fsdp2", "tp"),
    "model": ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss"),
    "experts": ("sluice", "grouped_mm", "eager"),
    "dtype": ("f32", "bf16", "autocast"),
    "checkpointing": ("norepeat", "reentrant", "nonreentrant"),
    "accumulation": ("onestep", "twosteps"),
    "frozen": ("trained", "fzlayer", "fzhalf", "fzrank", "fzrouter", "fzdense"),
    "moves": ("still", "byhand", "during"),
    "optimizer": ("torchadam", "suboptim"),
    "clipping": ("unclipped", "clip"),
    "saving": ("unsaved", "saved"),
    "chunks": ("nauto", "n1", "n3"),
    "policy": ("kept", "S1", "S2", "S3", "S4", "reuse"),
    "budget": ("nobudget", "budget"),
    "deduplicate": ("rows", "dedup", "node", "dedupauto"),
    "wire": ("wire32", "wire16", "wire8"),
    "transport": ("tcp", "c10d"),
    "chunking": ("cutauto", "tokens"),
    "grouping": ("grouped", "groupon", "groupoff"),
    "gradients": ("inplace", "autograd", "nopool"),
    "unsupported": ("error", "warn"),
}

RULES = (
    Rule(
        {"experts": ("grouped_mm", "eager"), "policy": ("S1", "S2"), "unsupported": "error"},
        "is not possible with experts that run as the host's modules",
    ),
    Rule({"frozen": "fzrank", "moves": ("byhand", "during")}, "requires_grad belongs to the place: do not"),
)
TABLE = Table(FACTORS, RULES, daily=7)


def options(row: dict[str, str]) -> dict[str, Any]:
    """Returns the options of `sluice.configure`."""
    return layer_options(row, on_unsupported=row["unsupported"])
