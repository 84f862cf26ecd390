# SPDX-License-Identifier: Apache-2.0
"""Trains models under torch's FSDP2, FSDP1 or DDP: gradients and parameters equal those of stock."""

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import pytest
import sluice
import sluice.optim
import tf_quantised
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rank_harness import Ranks
from sluice.errors import SluiceError
from test_tf_adapters import lora_on
from test_tf_parallel import check_trainer
from tf_compare import gaps
from tf_ep_jobs import split
from tf_models import batch, experts_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
STOCK = {"experts": "grouped_mm", "transport": "all_to_all"}
OURS = {"experts": "sluice", "transport": "sluice"}


def layers_of(model: Any) -> Any:
    return next(module for name, module in model.named_modules() if name.endswith("model.layers"))


def _sharded(model: Any, how: dict[str, Any]) -> Any:
    """Applies fully_shard. of: "layers" (and the root), "root" (only), "experts" or "around" (also each experts module,
    or the module that contains it). reshard: reshard_after_forward. dim: the sharded dimension of stacked experts.
    mesh: sizes of a mesh whose first dimension replicates."""
    options: dict[str, Any] = {"reshard_after_forward": how.get("reshard", True)}
    if how.get("mixed"):
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if how.get("offload"):
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how.get("dim"):
        options["shard_placement_fn"] = lambda tensor: Shard(how["dim"] if tensor.dim() == 3 else 0)
    if how.get("mesh"):
        options["mesh"] = init_device_mesh("cpu", tuple(how["mesh"]), mesh_dim_names=("replicas", "shards"))
    else:
        options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    of = how.get("of", "layers")
    for layer in [] if of == "root" else layers_of(model):
        if of == "around":
            fully_shard(layer.mlp, **options)
        if of == "experts":
            fully_shard(layer.mlp.experts, **options)
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def build(path: str, how: dict[str, Any], experts: str, transport: str) -> Any:
    """Loads the model and shards it. by: "fully_shard" (see _sharded), torch's "FSDP1" or "DDP", or "transformers" with
    the options of DistributedConfig in `config`. frozen: parameters whose names contain it do not train. lora: only
    adapters on attention and experts train. quantised: Sluice's experts stay in 4 bits, stock's are decoded. called:
    the module's own functions compute the experts."""
    by, config = how.get("by", "fully_shard"), {**how.get("config", {})}
    if by == "transformers" and how.get("mixed"):
        config["fsdp_mixed_precision"] = True
    if how.get("quantised"):
        folder, named = Path(path), {"dtype": torch.float32, **how.get("changes", {})}
        model = tf_quantised.load(folder / ("packed" if experts == "sluice" else "dense"), experts, **named)
    else:
        model = split(path, config, experts, transport, **how.get("changes", {}))
    if how.get("lora"):
        model = lora_on(model)
    for name, parameter in model.named_parameters():
        if how.get("frozen", "nothing") in name:
            parameter.requires_grad_(False)
    if how.get("called"):
        for module in experts_of(model):
            module.act_fn.register_forward_hook(lambda *_: None)
    if how.get("checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": how["checkpointing"] == "reentrant"})
    if by == "DDP":
        return DistributedDataParallel(model)
    if by == "FSDP1":
        policy = ModuleWrapPolicy({type(layers_of(model)[0])})
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=how["use_orig_params"], device_id=torch.device("cpu")
        )
    return model if by == "transformers" else _sharded(model, how)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


@contextlib.contextmanager
def _no_sync(model: Any, is_last: bool) -> Any:
    """Skips the reduction of gradients in all micro-steps but the last."""
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(is_last)
        yield
    else:
        with contextlib.nullcontext() if is_last else model.no_sync():
            yield


def _resumed(model: Any, optimizer: Any, again: Any) -> tuple[Any, Any]:
    """Writes model and optimizer with torch.distributed.checkpoint, and reads them into new ones."""
    fresh, other = again()
    with tempfile.TemporaryDirectory() as own:
        folder = [own]  # of rank 0, for all ranks
        dist.broadcast_object_list(folder)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        dcp.save(states, checkpoint_id=folder[0])
        with torch.no_grad():
            for parameter in fresh.parameters():
                parameter.zero_()
        states = dict(zip(("model", "optimizer"), get_state_dict(fresh, other)))
        dcp.load(states, checkpoint_id=folder[0])
        dist.barrier()  # before rank 0 removes the folder
    set_state_dict(fresh, other, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return fresh, other


def train(path: str, how: dict[str, Any], experts: str, transport: str) -> dict[str, Any]:
    """Returns losses, the gradients of each step, and the parameters at the end. micro: micro-steps, the last of which
    reduces. clip: the maximum norm. resume: a checkpoint is written and read after the first step. autocast: to bf16.
    adamw: Sluice's and torch's."""

    def made() -> tuple[Any, Any]:
        model = build(path, how, experts, transport).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        if how.get("adamw"):
            kind = sluice.optim.AdamW if experts == "sluice" else torch.optim.AdamW
            return model, kind(trained, lr=1e-3, eps=1e-3)
        return model, torch.optim.SGD(trained, lr=0.1, momentum=0.5)

    model, optimizer = made()
    rank, micro = dist.get_rank() // how.get("config", {}).get("tp_size", 1), how.get("micro", 1)
    losses, steps = [], []
    for number in range(STEPS):
        if number == 1 and how.get("resume"):
            model, optimizer = _resumed(model, optimizer, made)
        optimizer.zero_grad()
        for turn in range(micro):
            ids = batch(100 * number + 10 * turn + rank)
            with _no_sync(model, turn == micro - 1), torch.autocast("cpu", torch.bfloat16, bool(how.get("autocast"))):
                loss = model(input_ids=ids, labels=ids).loss
                losses.append(float(loss.detach()))
                loss.backward()
        if how.get("clip"):
            losses.append(float(_whole(torch.nn.utils.clip_grad_norm_(model.parameters(), how["clip"]))))
        steps.append({name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None})
        optimizer.step()
    with torch.no_grad():
        losses.append(float(model.eval()(input_ids=ids, labels=ids).loss))
    parameters = {name: _whole(p) for name, p in model.named_parameters() if p.requires_grad and p.numel() > 0}
    layers = sluice.stats(model)["layers"] if experts == "sluice" else []
    computed_by = [layer["computed_by"] for layer in layers]
    return {"losses": losses, "steps": steps, "parameters": parameters, "computed_by": computed_by}


def compared(path: str, how: dict[str, Any]) -> dict[str, Any]:
    """Trains under Sluice and under stock. Returns losses, the largest gaps of gradients in all steps and of
    parameters, and what computed the experts. In 16 bits: the distances of the first gradients from f32. `said` has
    the errors."""
    found, said = [], []
    for side in (OURS, STOCK):
        try:
            found.append(train(path, how, **side))
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    if said:
        return {"said": said}
    mine, stock = found
    values: dict[str, Any] = {
        "said": [],
        "computed_by": mine["computed_by"],
        "losses": [mine["losses"], stock["losses"]],
    }
    exact = {key: value for key, value in how.items() if key not in ("mixed", "autocast")}
    if exact != how:
        wanted = train(path, exact, **STOCK)["steps"][0]
        far = [
            {
                name: float((value.float() - wanted[name]).norm() / wanted[name].norm())
                for name, value in side["steps"][0].items()
            }
            for side in found
        ]
        return {**values, "distances": {name: [gap, far[1][name]] for name, gap in far[0].items()}}
    each = [gaps(*two) for two in zip(mine["steps"], stock["steps"], strict=True)]
    return {
        **values,
        "gradients": max(max(gap.values()) for gap in each),
        "parameters": max(gaps(mine["parameters"], stock["parameters"]).values()),
    }


def called_outside(path: str) -> list[str]:
    """Returns the errors of experts that are called without their sharded model, and then after it has run."""
    model, ids, said = build(path, {}, **OURS), batch(), []
    experts = experts_of(model)[0]
    for _ in range(2):
        try:
            experts(torch.randn(3, model.config.hidden_size), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
            said.append("")
        except SluiceError as error:
            said.append(str(error))
        model(input_ids=ids)
    return said


EVERYWHERE = {"changes": {"num_experts_per_tok": 8}}  # all experts: 16-bit rounding cannot change a route
ADAPTERS = {"lora": True, "kind": "gpt_oss"}
PACKED = {**ADAPTERS, "quantised": True, "frozen": "embed_tokens"}
EP = {"by": "transformers", "config": {"fsdp_size": 2}}
# Options of `build` and `train`. sizes: fields of the model's config.
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
    for found in ranks.run("test_tf_fsdp:compared", path=_saved(saved, how), how=how):
        _check(found, how)


@pytest.mark.parametrize("variant", REFUSED)
def test_TwoRanks_WhatStockRefuses_IsRefusedInItsWords(ranks: Ranks, saved: Any, variant: str) -> None:
    how, words = REFUSED[variant]
    for found in ranks.run("test_tf_fsdp:compared", path=_saved(saved, how), how=how):
        assert len(found["said"]) == 2 and all(words in said for said in found["said"]), found


def test_TwoRanks_ExpertsCalledWithoutTheirShardedModel_AreRefusedByName(ranks: Ranks, saved: Any) -> None:
    for said in ranks.run("test_tf_fsdp:called_outside", path=saved()):
        assert len(said) == 2
        assert all("gate_up_proj is a DTensor" in one and "call the model instead" in one for one in said), said


@pytest.mark.full
@pytest.mark.parametrize("variant", FOUR)
def test_FourRanks_EachVariant_AsStock(four_ranks: Ranks, saved: Any, variant: str) -> None:
    how = FOUR[variant]
    for found in four_ranks.run("test_tf_fsdp:compared", path=_saved(saved, how), how=how):
        _check(found, how)


@pytest.mark.parametrize("config", TRAINER)
def test_TwoRanks_TrainerWithAcceleratesFsdp_AsStock(ranks: Ranks, saved: Any, tmp_path: Path, config: str) -> None:
    found = []
    for experts in ("grouped_mm", "sluice"):
        case = {"path": saved(), "layout": {}, "folder": str(tmp_path / experts), "fsdp": TRAINER[config]}
        found.append(ranks.run("tf_ep_jobs:trainer", experts=experts, transport="", **case))
    for stock, mine in zip(*found):
        check_trainer(stock, mine)
