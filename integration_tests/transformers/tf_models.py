# SPDX-License-Identifier: Apache-2.0
"""Makes tiny models, and runs a step of them, also under expert parallelism."""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3 import DeepseekV3Config
from transformers.models.gpt_oss import GptOssConfig
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

VOCABULARY = 97
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_CONFIGS = {
    "mixtral": lambda: MixtralConfig(**_COMMON, intermediate_size=24, num_local_experts=4, router_aux_loss_coef=0.02),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, intermediate_size=40, moe_intermediate_size=24, num_experts=8, head_dim=8, norm_topk_prob=True
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**_COMMON, "num_key_value_heads": 4, "num_experts_per_tok": 4},
        intermediate_size=40,
        moe_intermediate_size=24,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
    ),
    "gpt_oss": lambda: GptOssConfig(**_COMMON, intermediate_size=24, num_local_experts=4, head_dim=8, sliding_window=8),
}
KINDS = tuple(_CONFIGS)


def make(kind: str, implementation: str = "sluice", dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Returns a model with fixed random parameters; `changes` are fields of its config."""
    torch.manual_seed(3)
    config = _CONFIGS[kind]()
    config.update(changes)
    model = AutoModelForCausalLM.from_config(config, experts_implementation=implementation, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        if "experts" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.to(dtype)


def experts_of(model: Any) -> list[Any]:
    """Returns the experts modules of a model that has some."""
    found = [module for name, module in model.named_modules() if name.endswith(".experts")]
    assert found
    return found


def runs_on_sluice(model: Any) -> bool:
    """Returns whether all experts have run fused on Sluice."""
    from sluice.adapters.transformers import experts

    states = [experts.state_of(module) for module in experts_of(model)]
    return all(state is not None and state.stats()["computed_by"] == "sluice" for state in states)


def batch(seed: int = 0, rows: int = 3, length: int = 17) -> torch.Tensor:
    """Returns token ids."""
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Runs a step, and returns loss, logits and all gradients."""
    model.train()
    model.zero_grad()
    out = model(input_ids=ids, labels=ids)
    out.loss.backward()
    values = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        grad = torch.zeros(()) if grad is None else grad
        values[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return values


def gaps(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> dict[str, float]:
    """Returns the largest difference of each tensor in units of the reference's largest element."""
    assert found.keys() == wanted.keys()
    return {
        name: float(
            (found[name].double() - wanted[name].double()).abs().max() / wanted[name].abs().max().clamp(min=1e-6)
        )
        for name in wanted
    }


# ---- under expert parallelism; called on every rank ----


def ep_step(kind: str, path: str, experts: str, layout: dict[str, int], transport: str = "sluice") -> dict[str, float]:
    """Returns the worst gaps to the unsplit model, over the same global batch."""
    from transformers.distributed import DistributedConfig

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tp, ep_size = layout.get("tp_size", 1), layout.pop("ep_size", world)
    batches = [batch(seed) for seed in range(world // tp)]
    unsplit = make(kind, "eager")
    wanted = _average([step(unsplit, ids) for ids in batches])
    model = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation=experts,
        attn_implementation="eager",
        distributed_config=DistributedConfig(**layout, ep_size=ep_size, ep_implementation=transport),
    )
    found = step(model, batches[rank // tp])
    del found["loss"], found["logits"], wanted["loss"], wanted["logits"]
    worst = gaps(found, wanted)
    with torch.no_grad():
        model.eval(), unsplit.eval()
        mine = model(input_ids=batches[rank // tp]).logits
        theirs = unsplit(input_ids=batches[rank // tp]).logits
    worst["logits"] = float((mine - theirs).abs().max() / theirs.abs().max())
    name = max(worst, key=lambda key: worst[key])
    return {name: worst[name]}


def ep_deduplicated(
    kind: str, path: str, experts: str, layout: dict[str, int], options: dict[str, Any]
) -> dict[str, Any]:
    """Returns the worst gaps with `deduplicate`, and the bytes that the last experts sent without and with it."""
    import sluice
    from transformers.distributed import DistributedConfig

    world, sent = torch.distributed.get_world_size(), []
    for on in (False, True):
        sluice.configure(deduplicate=on, **options)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path,
                experts_implementation=experts,
                distributed_config=DistributedConfig(**layout, ep_size=world, ep_implementation="sluice"),
            )
            module = model.model.layers[-1].mlp.experts
            step(model, batch())
            before = sluice.stats(module)["contexts"][0]["bytes_sent"]
            step(model, batch())
            sent.append(sluice.stats(module)["contexts"][0]["bytes_sent"] - before)
            worst = ep_step(kind, path, experts, layout) if on else {}
        finally:
            sluice.configure()
    return {"worst": worst, "sent": sent}


def ep_kept(kind: str, path: str, folder: str) -> dict[str, Any]:
    """Trains until n is decided, with kept decisions in `folder`, and returns the reasons, and the passes of races."""
    import sluice
    from sluice import layer_lookup
    from transformers.distributed import DistributedConfig

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    sluice.configure(tuner={"decisions": f"{folder}/kept{rank}.json"})
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            experts_implementation="sluice",
            distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sluice"),
        )
        for _ in range(100):  # until there is a decision, which all ranks make at the same step
            step(model, batch())
            if sluice.decisions(model):
                break
        decided = sluice.decisions(model)
        (context,) = layer_lookup.contexts(model)
        races = context.tuner_stats()["race_passes"]
        context.close()
    finally:
        sluice.configure()
    torch.distributed.barrier()  # the first rank has left its decisions
    return {"why": [entry["why"] for entry in decided], "race_passes": races}


def ep_save(kind: str, path: str, layout: dict[str, int], folder: str) -> bool:
    """Returns whether a model that was loaded split and saved again in `folder` has the same bits."""
    from transformers.distributed import DistributedConfig

    world = torch.distributed.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation="sluice",
        distributed_config=DistributedConfig(**layout, ep_size=world, ep_implementation="sluice"),
    )
    step(model, batch())
    model.save_pretrained(folder)
    torch.distributed.barrier()
    before = AutoModelForCausalLM.from_pretrained(path).state_dict()
    after = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def _average(outcomes: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    first = copy.copy(outcomes[0])
    for name in first:
        if name != "logits":
            first[name] = sum(outcome[name] for outcome in outcomes) / len(outcomes)
    return first


def ep_misconfigured(kind: str, path: str) -> list[str]:
    """Writes a wrong section into rank 1's config after the first call, then removes it; returns each call's result."""
    from sluice.errors import SluiceError
    from transformers.distributed import DistributedConfig

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation="sluice",
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sluice"),
    )
    experts = model.model.layers[0].mlp.experts
    total = experts.num_experts * world
    ids = torch.arange(6).remainder(total).view(3, 2)
    said = []
    for section in (None, {"chnks": 2}, None):
        if rank == 1:
            experts.config.sluice = section
        try:
            experts(torch.randn(3, model.config.hidden_size), ids, torch.ones(3, 2))
            said.append("")
        except SluiceError as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def ep_of_a_stranger(kind: str, path: str) -> str:
    """Returns the error for a model whose config.json names the transport between ranks."""
    from sluice.errors import SluiceError
    from transformers.distributed import DistributedConfig

    world = torch.distributed.get_world_size()
    config = AutoConfig.from_pretrained(path)
    config.sluice = {"transport": "c10d", "timeout": 1e9}
    layout = DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sluice")
    try:
        AutoModelForCausalLM.from_pretrained(
            path, config=config, experts_implementation="sluice", distributed_config=layout
        )
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def ep_mistyped(kind: str, path: str, file: str) -> list[str]:
    """Returns the errors of two calls with the tuner's decisions in `file`, which Sluice has not written."""
    import sluice
    from sluice.errors import SluiceError
    from transformers.distributed import DistributedConfig

    world = torch.distributed.get_world_size()
    sluice.configure(tuner={"decisions": file})
    said = []
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path,
            experts_implementation="sluice",
            distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sluice"),
        )
        for _ in range(2):
            try:
                step(model, batch())
                said.append("")
            except SluiceError as error:
                said.append(f"{type(error).__name__}: {error}")
    finally:
        sluice.configure()
    return said


def ep_refused(kind: str, path: str) -> dict[str, str]:
    """Passes hidden states of an unsupported dtype on rank 1 in the first call, then valid ones on all ranks. Returns
    the errors of each rank, and `sluice.stats` afterwards."""
    import sluice
    from transformers.distributed import DistributedConfig

    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        path,
        experts_implementation="eager",  # callbacks compute in the dtype of the rows: each rank decides what it rejects
        distributed_config=DistributedConfig(fsdp_size=world, ep_size=world, ep_implementation="sluice"),
    )
    experts = model.model.layers[0].mlp.experts
    assert sluice.stats(model)["layers"] == []  # with any experts_implementation, layers are made by the first call
    width, total = model.config.hidden_size, experts.num_experts * world
    ids = torch.arange(6).remainder(total).view(3, 2)
    told = ""
    try:
        experts(torch.randn(3, width, dtype=torch.float64 if rank == 1 else torch.float32), ids, torch.ones(3, 2))
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    out = experts(torch.randn(3, width), ids, torch.ones(3, 2))
    return {
        "told": told,
        "shape": str(list(out.shape)),
        "computed_by": sluice.stats(experts)["layers"][0]["computed_by"],
    }
