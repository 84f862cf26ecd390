# SPDX-License-Identifier: Apache-2.0
"""Rank-side: uses a model split over ranks, and compares it with the whole model or transformers' own transport."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import sluice
import tf_models
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from peft import PeftModel
from sluice.adapters.transformers import experts as adapter
from sluice.errors import SluiceError
from test_tf_adapters import fill_lora, lora_on
from tf_compare import gaps
from tf_models import batch, make, step
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, AutoModelForCausalLM, Trainer
from transformers.distributed import DistributedConfig


def split(path: str, layout: dict[str, int], experts: str = "sluice", transport: str = "sluice", **how: Any) -> Any:
    """Loads the saved model with its experts split over all ranks, if `layout` has no other ep_size; {}: whole."""
    if layout:
        layout = {"ep_size": dist.get_world_size(), **layout}
        how["distributed_config"] = DistributedConfig(**layout, ep_implementation=transport)
    return AutoModelForCausalLM.from_pretrained(
        path, experts_implementation=experts, attn_implementation="eager", **how
    )


def compared(kind: str, path: str, experts: str, transport: str, layout: dict[str, int]) -> dict[str, Any]:
    """Runs a step, and returns the worst gap of gradients and of logits without gradients to the unsplit model over the
    same global batch, or the error."""
    try:
        batches, mine = _batches(layout)
        unsplit = make(kind, "eager")
        steps = [step(unsplit, ids) for ids in batches]
        model = split(path, layout, experts, transport)
        found = step(model, mine)
    except Exception as error:
        return {"said": f"{type(error).__name__}: {error}"}
    wanted = {name: sum(one[name] for one in steps) / len(steps) for name in found if name not in ("loss", "logits")}
    found = {name: found[name] for name in wanted}
    with torch.no_grad():
        found["logits"], wanted["logits"] = (each.eval()(input_ids=mine).logits for each in (model, unsplit))
    gap, name = max((gap, name) for name, gap in gaps(found, wanted).items())
    return {"said": "", "gap": gap, "of": name}


def _batches(layout: dict[str, int]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Returns all batches, and this rank's."""
    shared = layout.get("tp_size", 1)
    found = [batch(seed) for seed in range(dist.get_world_size() // shared)]
    return found, found[dist.get_rank() // shared]


def adapted(kind: str, path: str, layout: dict[str, int], moved: bool) -> dict[str, Any]:
    """Compares LoRA on the experts of a split model with PEFT on the unsplit one: returns gaps of logits, of gradients
    and of PEFT's initial values, and the share of A and B that this rank has."""
    batches, mine = _batches(layout)
    made = []
    for base in (make(kind, "eager"), split(path, layout)):
        torch.manual_seed(11)
        made.append(lora_on(base, fill=False))
    unsplit, model = made
    started = gaps(*({n: t for n, t in m.state_dict().items() if "lora_" in n} for m in (model, unsplit)))
    fill_lora(unsplit)
    fill_lora(model)
    steps = [step(unsplit, ids) for ids in batches]
    modules = [wrapper.get_base_layer() for wrapper in tf_models.experts_of(model)]
    if moved:
        for experts in modules:
            home = adapter.kept_of(experts).home
            sluice.move_experts(experts, home.expert_rank[::-1], home.expert_slot)
    found = step(model, mine)
    if moved:  # with the gradients
        for experts in modules:
            sluice.move_experts(experts, *adapter.kept_of(experts).home)
        found.update({name: p.grad.full_tensor() for name, p in model.named_parameters() if is_own(p)})
    wanted = {name: sum(one[name] for one in steps) / len(steps) for name in steps[0] if "lora_" in name}
    owned = {name: p for name, p in model.named_parameters() if is_own(p)}
    for name in sorted(wanted.keys() - owned.keys()):
        dist.all_reduce(found[name])
        found[name] /= dist.get_world_size()
    wanted["logits"] = steps[dist.get_rank() // layout.get("tp_size", 1)]["logits"]
    found = {name: found[name] for name in wanted}
    frozen = [parameter for name, parameter in model.named_parameters() if "lora_" not in name]
    return {
        "gaps": gaps(found, wanted),
        "started": started,
        "frozen": all(parameter.grad is None for parameter in frozen),
        "owned": sorted(owned),
        "shares": sorted({p.to_local().numel() / p.numel() for p in owned.values()}),
    }


def is_own(parameter: torch.nn.Parameter) -> bool:
    """Returns whether this rank has only its own experts' part of the factor."""
    return parameter.requires_grad and hasattr(parameter, "to_local")


def accumulated(path: str, layout: dict[str, int]) -> dict[str, Any]:
    """Returns, for two micro-steps, the worst gap between gradients that the library and that autograd added, and the
    number of backwards that added themselves."""
    _, mine = _batches(layout)
    grads: list[dict[str, torch.Tensor]] = []
    passes = 0
    for mode in ("autograd", "in_place"):
        sluice.configure(accumulate=mode)
        try:
            model = split(path, layout).train()
            experts = model.model.layers[-1].mlp.experts
            for number in range(2):
                if number == 1:
                    before = sluice.stats(experts)["contexts"][0]["passes_in_place"]
                if layout.get("fsdp_size", 1) > 1:
                    model.set_requires_gradient_sync(number == 1)
                ids = mine.roll(number, 1)
                model(input_ids=ids, labels=ids).loss.backward()
            passes = sluice.stats(experts)["contexts"][0]["passes_in_place"] - before
            given = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            grads.append({name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in given.items()})
        finally:
            sluice.configure()
    return {"worst": max(gaps(*reversed(grads)).values()), "passes": passes}


def generation(kind: str, path: str, layout: dict[str, int]) -> dict[str, Any]:
    """Generates tokens from prompts of different lengths on each rank, of which one ends long before the other, and
    compares them with the whole model's."""
    rank = dist.get_rank()
    shared = layout.get("tp_size", 1) > 1
    prompt = batch(5, rows=1 if shared or rank else 3, length=4 if shared or rank else 11)
    count = 12 if shared or rank else 3
    found = []
    for is_split, model in enumerate((make(kind, "eager"), split(path, layout))):
        model.eval()
        with torch.no_grad():
            ids = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
                synced_gpus=bool(is_split) and not shared,
            )
        found.append(ids.tolist())
    return {"whole": found[0], "split": found[1], "new": count}


def of_a_stranger(path: str) -> str:
    """Returns the error for a model whose config.json names the transport between ranks."""
    config = AutoConfig.from_pretrained(path)
    config.sluice = {"transport": "c10d", "timeout": 1e9}
    try:
        split(path, {"fsdp_size": dist.get_world_size()}, config=config)
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


@contextlib.contextmanager
def _accelerates_fsdp() -> Iterator[None]:
    """Makes accelerate apply FSDP2 on a CPU, where it otherwise does not: its state is set as on a device."""
    made, environment = AcceleratorState.__init__, dict(os.environ)

    def make(self: Any, *args: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        made(self, *args, fsdp_plugin=fsdp_plugin, **named)
        if fsdp_plugin is not None:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = make
    try:
        yield
    finally:
        AcceleratorState.__init__ = made
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def trainer(
    path: str, layout: dict[str, int], folder: str, experts: str, transport: str, fsdp: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Runs transformers' Trainer over a split model, with accumulation, evaluation and checkpointing. Its final
    checkpoint, loaded whole, must have the trained model's loss. fsdp: Trainer's fsdp_config, with which
    accelerate shards a model that is not split."""
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    AcceleratorState._reset_state(reset_partial_state=True)  # an earlier Trainer had another layout
    model = split(path, layout, experts, transport)
    if not (fsdp or {}).get("activation_checkpointing"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    data = [{"input_ids": row, "labels": row} for seed in range(8) for row in batch(seed, rows=4)]
    arguments = tf_models.arguments(
        folder,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        optim="sgd",
        eval_strategy="steps",
        eval_steps=2,
        **({} if fsdp is None else {"fsdp": True, "fsdp_config": fsdp}),
    )
    with contextlib.nullcontext() if fsdp is None else _accelerates_fsdp():
        running = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:8])
        running.train()
    history = running.state.log_history
    if fsdp is None:
        running.save_model(folder)
    else:
        assert isinstance(model, FSDPModule)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    dist.barrier()
    model.eval()
    with torch.no_grad():
        mine = float(model(input_ids=batch(3), labels=batch(3)).loss)
        whole = AutoModelForCausalLM.from_pretrained(
            folder if fsdp is None else path, experts_implementation="eager", attn_implementation="eager"
        )
        if fsdp is not None:
            dist.broadcast_object_list(states := [state])  # only the first rank has it
            whole.load_state_dict(states[0])
        saved = float(whole.eval()(input_ids=batch(3), labels=batch(3)).loss)
    return {
        "losses": [float(entry["loss"]) for entry in history if "loss" in entry],
        "evaluated": [float(entry["eval_loss"]) for entry in history if "eval_loss" in entry],
        "mine": mine,
        "saved": saved,
        "passes": sluice.stats(model.model.layers[-1].mlp.experts)["contexts"][0]["num_passes"]
        if experts == "sluice"
        else 0,
    }


def trainer_adapted(path: str, folder: str, steps: int = 6) -> dict[str, Any]:
    """Runs Trainer over a split model with LoRA on attention and experts and clipped gradients. Returns losses and
    norms, those of the whole model with the same batches in one process, what was all-reduced, and the saved adapter.

    The batches of a step are those that accelerate gives to each rank, in the order of the data.
    """

    class InOrder(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    AcceleratorState._reset_state(reset_partial_state=True)
    world, rows = (
        dist.get_world_size(),
        [row for seed in range(steps) for row in batch(seed, rows=dist.get_world_size())],
    )
    model = lora_on(split(path, {"fsdp_size": world}))
    arguments = tf_models.arguments(
        folder, max_steps=steps, per_device_train_batch_size=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.1
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    running = InOrder(model=model, args=arguments, train_dataset=data)
    reduced: list[int] = []
    all_reduce = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **how: (reduced.append(tensor.numel()), all_reduce(tensor, *args, **how))[1]
    try:
        running.train()
    finally:
        dist.all_reduce = all_reduce
    running.save_model(folder)
    dist.barrier()
    history = [entry for entry in running.state.log_history if "loss" in entry]
    trained = model.state_dict()

    whole = lora_on(make("qwen3_moe", "eager")).train()
    optimizer = torch.optim.SGD([p for p in whole.parameters() if p.requires_grad], lr=0.1)
    losses, norms = [], []
    for number in range(steps):
        optimizer.zero_grad()
        of_ranks = [
            whole(input_ids=ids, labels=ids).loss for ids in torch.stack(rows).view(steps, world, 1, -1)[number]
        ]
        loss = torch.stack(of_ranks).mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)))
        optimizer.step()
        losses.append(float(loss.detach()))
    wanted = {name: p.detach() for name, p in whole.named_parameters() if "lora_" in name}
    loaded = PeftModel.from_pretrained(make("qwen3_moe", "eager"), folder)
    saved = {name: p.detach() for name, p in loaded.named_parameters() if "lora_" in name}

    of_disk = [
        PeftModel.from_pretrained(split(path, {"fsdp_size": world}), folder, is_trainable=True, low_cpu_mem_usage=low)
        for low in (False, True)
    ]
    return {
        "losses": [[float(entry["loss"]) for entry in history], losses],
        "norms": [[float(entry["grad_norm"]) for entry in history], norms],
        "trained": gaps({name: trained[name] for name in wanted}, wanted),
        "saved": {name: float((saved[name] - trained[name]).abs().max()) for name in wanted},
        "loaded": [
            {name: float((found.state_dict()[name] - trained[name]).abs().max()) for name in wanted}
            for found in of_disk
        ],
        "owned": [sum(is_own(p) for p in found.parameters()) for found in (model, *of_disk)],
        "reduced": sorted(set(reduced)),
        "sizes": [
            sorted(
                {p.numel() for name, p in whole.named_parameters() if "lora_" in name and ("experts" in name) == own}
            )
            for own in (False, True)
        ],
    }
