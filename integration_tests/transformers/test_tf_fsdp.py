# SPDX-License-Identifier: Apache-2.0
"""Trains models under torch's FSDP2, FSDP1 or DDP: gradients and parameters equal those of stock."""

from pathlib import Path
from typing import Any

import pytest
from rank_harness import Ranks
from test_tf_parallel import check_trainer

EVERYWHERE = {"changes": {"num_experts_per_tok": 8}}  # all experts: 16-bit rounding cannot change a route
ADAPTERS = {"lora": True, "kind": "gpt_oss"}
PACKED = {**ADAPTERS, "quantised": True, "frozen": "embed_tokens"}
EP = {"by": "transformers", "config": {"fsdp_size": 2}}
# Options of tf_fsdp_jobs.build and train. sizes: fields of the model's config.
TWO = {
    "layers": {},
    "root alone": {"of": "root"},
    "experts by themselves": {"of": "experts"},
    "blocks by themselves": {"of": "around"},
    "kept after the forward": {"reshard": False},
    "bf16 with sums in f32": {"mixed": True, **EVERYWHERE},
    "bf16, micro-steps": {"mixed": True, "micro": 2, **EVERYWHERE},
    "autocast": {"autocast": True, **EVERYWHERE},
    "offloaded": {"offload": True},
    "shards of another dimension": {"dim": 2},
    "shards of different sizes": {"sizes": {"num_experts": 5}},
    "gradients of 1 MiB": {"sizes": {"moe_intermediate_size": 1024}, "micro": 2},
    "transposed with biases": {"kind": "gpt_oss"},
    "called experts": {"called": True, "micro": 2},
    "micro-steps": {"micro": 2},
    "micro-steps, kept": {"micro": 2, "reshard": False},
    "clipped": {"clip": 0.1},
    "Sluice's AdamW": {"adamw": True, "micro": 2},
    "frozen experts": {"frozen": "experts"},
    "half frozen experts": {"frozen": "gate_up_proj", "of": "root"},
    "adapters": ADAPTERS,
    "adapters, blocks by themselves": {"lora": True, "of": "around", "micro": 2},
    "adapters on quantised experts": PACKED,
    "adapters on quantised experts by themselves": {**PACKED, "of": "experts", "micro": 2},
    "resumed": {"resume": True},
    "resumed adapters": {"resume": True, "lora": True},
    "checkpointed": {"checkpointing": "nonreentrant"},
    "checkpointed reentrantly": {"checkpointing": "reentrant"},
    "DDP": {"by": "DDP", "micro": 2},
    "FSDP1": {"by": "FSDP1", "use_orig_params": True, "micro": 2},
    "FSDP1, flat": {"by": "FSDP1", "use_orig_params": False},
    "transformers": {"by": "transformers", "config": {"fsdp_size": 2, "ep_size": 1}},
    "ep, bf16 with sums in f32": {**EP, "mixed": True, **EVERYWHERE},
    "ep, kept": {"by": "transformers", "config": {"fsdp_size": 2, "fsdp_plan": {"model.layers.*": "keep_full_weight"}}},
    "ep, resumed": {**EP, "resume": True},
    "ep, Sluice's AdamW": {**EP, "adamw": True, "resume": True},
    "ep, gradients of 1 MiB": {**EP, "sizes": {"moe_intermediate_size": 1024}, "micro": 2},
}
FOUR = {
    "groups of two": {"reshard": 2},
    "replicas": {"mesh": [2, 2]},
    "ep, replicas": {"by": "transformers", "config": {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2}},
    "ep, shards": {"by": "transformers", "config": {"fsdp_size": 4, "ep_size": 2}, "micro": 2},
    "ep, shards, resumed": {"by": "transformers", "config": {"fsdp_size": 4, "ep_size": 2}, "resume": True},
}
# Cases that stock refuses too, with the words of its error.
REFUSED = {
    "ep, clipped": ({**EP, "clip": 0.1}, "must have the same mesh"),
    "ep, offloaded": (
        {"by": "transformers", "config": {"fsdp_size": 2, "fsdp_cpu_offload": True}},
        "Cannot access accelerator device",
    ),
}
# Values of Trainer's fsdp_config. {}: the defaults.
TRAINER = {
    "defaults": {},
    "kept after the forward": {"reshard_after_forward": False},
    "loaded on one rank": {"cpu_ram_efficient_loading": True},
    "accelerate checkpoints": {"activation_checkpointing": True},
}


def _saved(saved: Any, how: dict[str, Any]) -> str:
    return str(saved(how.get("kind", "qwen3_moe"), how.get("quantised", False), **how.get("sizes", {})))


def _check(found: dict[str, Any], how: dict[str, Any]) -> None:
    assert found["said"] == []
    assert set(found["computed_by"]) == {"the module's own functions" if how.get("called") else "sluice"}, found
    if "distances" in found:
        for name, (gap, alone) in found["distances"].items():
            assert gap <= 1.5 * alone + 0.02, (name, gap, alone)
        assert any("experts" in name for name in found["distances"])
        return
    mine, stock = found["losses"]
    assert mine == pytest.approx(stock, rel=1e-5) and stock[-1] != stock[0], found
    assert found["gradients"] < 1e-4 and found["parameters"] < 1e-5, found


@pytest.mark.parametrize("variant", TWO)
def test_TwoRanks_EachVariant_AsStock(ranks: Ranks, saved: Any, variant: str) -> None:
    how = TWO[variant]
    for found in ranks.run("tf_fsdp_jobs:compared", path=_saved(saved, how), how=how):
        _check(found, how)


@pytest.mark.parametrize("variant", REFUSED)
def test_TwoRanks_WhatStockRefuses_IsRefusedInItsWords(ranks: Ranks, saved: Any, variant: str) -> None:
    how, words = REFUSED[variant]
    for found in ranks.run("tf_fsdp_jobs:compared", path=_saved(saved, how), how=how):
        assert len(found["said"]) == 2 and all(words in said for said in found["said"]), found


def test_TwoRanks_ExpertsCalledWithoutTheirShardedModel_AreRefusedByName(ranks: Ranks, saved: Any) -> None:
    for said in ranks.run("tf_fsdp_jobs:called_outside", path=saved()):
        assert len(said) == 2
        assert all("gate_up_proj is a DTensor" in one and "call the model instead" in one for one in said), said


@pytest.mark.full
@pytest.mark.parametrize("variant", FOUR)
def test_FourRanks_EachVariant_AsStock(four_ranks: Ranks, saved: Any, variant: str) -> None:
    how = FOUR[variant]
    for found in four_ranks.run("tf_fsdp_jobs:compared", path=_saved(saved, how), how=how):
        _check(found, how)


@pytest.mark.parametrize("config", TRAINER)
def test_TwoRanks_TrainerWithAcceleratesFsdp_AsStock(ranks: Ranks, saved: Any, tmp_path: Path, config: str) -> None:
    found = []
    for experts in ("grouped_mm", "sluice"):
        case = {"path": saved(), "layout": {}, "folder": str(tmp_path / experts), "fsdp": TRAINER[config]}
        found.append(ranks.run("tf_ep_jobs:trainer", experts=experts, transport="", **case))
    for stock, mine in zip(*found):
        check_trainer(stock, mine)
