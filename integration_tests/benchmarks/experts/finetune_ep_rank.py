# SPDX-License-Identifier: Apache-2.0
"""The rank program of finetune.py: training steps of a model under expert parallelism; the sides take turns.

All sides use one model, whose experts change their transport between steps: two models would not fit into memory.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sluice
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES

from integration_tests.benchmarks.experts.experts_block import SHAPES
from integration_tests.benchmarks.measuring.rank import Rank, gather, seconds_of

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
LENGTH = 256  # maximum tokens of a sequence
MOST_SETTLING = 32


def make_checkpoint(folder: Path, plan: dict[str, Any]) -> None:
    """Saves a model with random weights in bfloat16."""
    shape = SHAPES[plan["shape"]]
    config = Qwen3MoeConfig(
        vocab_size=plan["vocabulary"],
        num_hidden_layers=plan["layers"],
        hidden_size=shape.model,
        moe_intermediate_size=shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        num_attention_heads=max(4, shape.model // 64),  # 32 for Qwen3-30B-A3B
        num_key_value_heads=4,
        head_dim=128,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


def load(plan: dict[str, Any]) -> Any:
    """Loads the model with its adapters. Gradients of plain parameters are averaged over ranks, as in `Trainer`."""
    world = dist.get_world_size()
    config = AutoConfig.from_pretrained(plan["folder"])
    if plan["group"] == "packed":
        config = sluice.keep_quantised(config, "mxfp4")
    if plan["deduplicate"]:
        config.sluice = {"deduplicate": True}
    base = AutoModelForCausalLM.from_pretrained(
        plan["folder"],
        config=config,
        dtype=getattr(torch, plan["dtype"]),
        experts_implementation="sluice",
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sluice"),
    )
    base.set_reshard_after_forward(False)  # FSDP gathers weights once and keeps them
    base.set_reshard_after_backward(False)
    stacks = EXPERTS if plan["group"] == "experts" else None
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=plan["rank"], target_modules=ATTENTION, target_parameters=stacks))
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter.data, DTensor):
            parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
    return model.train()


def chooser(model: Any) -> Callable[[str], None]:
    """Returns a function that gives the model's experts the transport of a side. transformers itself installs that of
    `stock`."""
    modules = [module for module in model.modules() if sluice.adapters.transformers.experts.is_transported(module)]
    forwards = {"sluice": [module.forward for module in modules]}
    mesh = model.base_model.model._mesh_manager
    for module in modules:
        del module.forward
        ALL_PARALLEL_STYLES["ep_dispatch_experts"].install_forward(
            module, ep_mesh=mesh.get_mesh("ep"), tp_mesh=mesh.get_mesh("tp"), ep_implementation="all_to_all"
        )
    forwards["stock"] = [module.forward for module in modules]

    def choose(side: str) -> None:
        for module, forward in zip(modules, forwards[side], strict=True):
            module.forward = forward
            module.config._experts_implementation = {"sluice": "sluice", "stock": "grouped_mm"}[side]

    return choose


def bytes_sent() -> int:
    """Bytes that this rank's end of the link has sent, headers included."""
    device = os.environ["GLOO_SOCKET_IFNAME"]
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{device}:")]
    return int(line.partition(":")[2].split()[8])


def main() -> None:
    rank = Rank()
    plan = rank.plan
    folder = Path(plan["folder"])
    if rank.number == 0 and not (folder / "config.json").exists():
        make_checkpoint(folder, plan)
    dist.barrier()
    model = load(plan)
    choose = chooser(model) if "stock" in plan["sides"] else lambda side: None
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    length = min(LENGTH, plan["tokens"])
    generator = torch.Generator().manual_seed(rank.number)
    ids = torch.randint(plan["vocabulary"], (plan["tokens"] // length, length), generator=generator)
    logits: dict[str, torch.Tensor] = {}
    for side in plan["sides"]:
        choose(side)
        with torch.no_grad():
            logits[side] = model(input_ids=ids).logits.float()

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(MOST_SETTLING):
        step()
        if all(context["last_is_settled"] for context in sluice.stats(model)["contexts"]):
            break
    found: dict[str, dict[str, Any]] = {side: {"seconds": [], "bytes": [], "cpu_s": []} for side in plan["sides"]}
    for number in range(plan["rounds"]):
        for side in plan["sides"] if number % 2 == 0 else reversed(plan["sides"]):
            choose(side)
            step()  # a measured step follows a step of the same side
            before, began = bytes_sent(), time.process_time()
            found[side]["seconds"].append(seconds_of(step))
            used = gather((bytes_sent() - before, time.process_time() - began))
            for name, each in zip(("bytes", "cpu_s"), zip(*used)):
                found[side][name].append(sum(each) / rank.world_size)
        rank.report(done=number + 1, of=plan["rounds"])
    gap = (logits[plan["sides"][0]] - logits["sluice"]).abs().max() / logits["sluice"].abs().max()
    chunks = sluice.stats(model)["contexts"][0]["last_num_chunks"]
    rank.leave({"sides": found, "chunks": chunks, "difference": max(gather(gap.item()))})


if __name__ == "__main__":
    main()
