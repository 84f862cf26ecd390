# SPDX-License-Identifier: Apache-2.0
"""Rank-side: tests in addition to a whole training: single layers, specs, errors, checkpoints."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any

import mg_models
import sluice
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from sluice import megatron as ours
from sluice.adapters.megatron.layer import SluiceMoELayer
from sluice.errors import SluiceError


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets these variables inside of the context."""
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]


def moe_layers(model: torch.nn.Module) -> list[MoELayer]:
    """Returns the MoE layers in the order of the model."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]


def train_named(text: str) -> dict[str, Any]:
    """Trains with the object that --spec names, and with options from the environment."""
    with environment(SLUICE_OPTIONS=text):
        found = mg_models.train_both(2, how="named", num_layers=3, moe_layer_freq=2)
        model = mg_models.model_of(2, "named", num_layers=3, moe_layer_freq=2)
        found["kinds"] = [type(layer.mlp).__name__ for layer in model.decoder.layers]
        found["chunks"] = [layer._sluice._options.chunks for layer in moe_layers(model)]
    return found


def forms_of_specs() -> dict[str, Any]:
    """Counts Sluice's classes in the results of with_sluice; the given specs stay stock."""
    mg_models.groups(2)
    config = mg_models.config_of(2, num_layers=3, moe_layer_freq=[1, 0, 1])
    block = mg_models.spec_of(config, "stock", {})

    def count(spec: Any) -> int:
        return str(spec).count("SluiceMoELayer")

    layer = block.layer_specs[0]
    mlp = layer.submodules.mlp
    later = ours.with_sluice(lambda config, vp_stage=None: mg_models.spec_of(config, "stock", {}), chunks=2)
    counts = {
        "block": count(ours.with_sluice(block)),
        "layer": count(ours.with_sluice(layer)),
        "mlp": count(ours.with_sluice(mlp, chunks=2)),
        "function": count(later(config)),
        "before": count(block) + count(layer) + count(mlp),
    }
    try:
        ours.with_sluice(block.layer_specs[1])
    except SluiceError as error:
        counts["dense"] = str(error)
    return counts


def under_a_plan(path: str) -> dict[str, Any]:
    """Trains with with_sluice(spec, plan=path), and returns the plan of each layer."""
    shape = {"num_layers": 3, "moe_layer_freq": [1, 0, 1]}
    found = mg_models.train_both(2, options={"plan": path}, **shape)
    host = mg_models.Host(2, "decorated", {"plan": path}, **shape)
    host.train(1)
    made = [next(iter(layer._sluice._layers.values())) for layer in moe_layers(host.model)]
    found["plans"] = [str(layer.plan.choice) for layer in made]
    found["chunks"] = made[0].context.stats()["last_num_chunks"]
    return found


def refused_plan(paths: list[str], **options: Any) -> str:
    """Returns the error of a rank for the plan of its path, before anything has run."""
    path = paths[dist.get_rank() % len(paths)]
    try:
        mg_models.model_of(2, "decorated", {"plan": path, **options}, num_layers=3, moe_layer_freq=[1, 0, 1])
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def switched_off() -> dict[str, Any]:
    """Trains a model with a decorated spec under SLUICE=0: the host runs it."""
    with environment(SLUICE="0"):
        host = mg_models.Host(2, "decorated")
        found = host.train(1)
    stock = mg_models.Host(2, "stock").train(1)
    return {"found": found, "stock": stock, "kept": [layer._sluice is None for layer in moe_layers(host.model)]}


class _OtherExperts(SequentialMLP):
    """Experts of an unknown class."""


def refused_experts(policy: str) -> dict[str, Any]:
    """Builds experts of another class with this on_unsupported."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            config = mg_models.model_of(2).config
            spec = ours.with_sluice(mg_models.spec_of(config, "stock", {}), on_unsupported=policy)
            _with_experts(spec, _OtherExperts)
            model = mg_models.GPTModel(
                config=config,
                transformer_layer_spec=spec,
                vocab_size=mg_models.VOCABULARY,
                max_sequence_length=mg_models.SEQUENCE,
            )
    except SluiceError as error:
        return {"error": str(error)}
    return {"kept": [layer._sluice is None for layer in moe_layers(model)], "said": said.getvalue()}


def _with_experts(spec: Any, new: type) -> None:
    for layer in {id(layer): layer for layer in spec.layer_specs}.values():
        mlp = layer.submodules.mlp
        moe = mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]
        if isinstance(moe.experts, ModuleSpec):
            moe.experts.module = new
        else:
            moe.experts = type(moe.experts)(new, *moe.experts.args, **moe.experts.keywords)


def _one_layer(**changes: Any) -> SluiceMoELayer:
    model = mg_models.model_of(2, "decorated", {"gemm": "host"}, num_layers=1, **changes)
    return moe_layers(model)[0]


def one_rank_fails() -> dict[str, Any]:
    """Gives rank 1 hidden states of another dtype: both ranks get an error, and continue."""
    layer = _one_layer()
    rank = dist.get_rank()
    hidden = torch.randn(8, 2, 32, dtype=torch.float64 if rank == 1 else torch.float32)
    told = ""
    try:
        layer(hidden)
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    output, _ = layer(torch.randn(8, 2, 32))
    return {"told": told, "finite": bool(output.isfinite().all())}


def hooked_expert() -> dict[str, Any]:
    """A hook on an expert runs, with the same output as before."""
    layer = _one_layer()
    hidden = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    before, _ = layer(hidden)
    rows: list[int] = []
    layer.experts.local_experts[0].register_forward_hook(lambda module, given, out: rows.append(given[0].shape[0]))
    after, _ = layer(hidden)
    return {
        "rows": sum(rows),
        "gap": float((before - after).abs().max()),
        "computed_by": sluice.stats(layer)["layers"][0]["computed_by"],
    }


class _Adapted(torch.nn.Module):
    """LoRA around a linear of Megatron, which PEFT and others replace by it; `weight` is the linear's."""

    def __init__(self, base_layer: torch.nn.Module) -> None:
        super().__init__()
        self.base_layer, (rows, columns) = base_layer, base_layer.weight.shape
        self.a, self.b = torch.nn.Linear(columns, 2, bias=False), torch.nn.Linear(2, rows, bias=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        result, bias = self.base_layer(x)
        return result + self.b(self.a(x)), bias


def replaced_linears() -> dict[str, Any]:
    """Wraps the experts' linears in adapters after the model was built."""
    layer = _one_layer()
    layer.experts.requires_grad_(False)
    hidden = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank()))
    before, _ = layer(hidden)
    for expert in layer.experts.local_experts:
        for name in ("linear_fc1", "linear_fc2"):
            setattr(expert, name, _Adapted(getattr(expert, name)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            after, _ = layer(hidden)
    after.sum().backward()
    return {
        "changed": float((after - before).abs().max()),
        "computed_by": sluice.stats(layer)["layers"][0]["computed_by"],
        "gradients": all(p.grad is not None for p in layer.experts.parameters() if p.requires_grad),
        "said": [str(each.message) for each in said if "run as modules now" in str(each.message)],
    }


def few_tokens() -> dict[str, Any]:
    """Gives rank 1 one token: some experts have no tokens, but all have gradients."""
    layer = _one_layer()
    hidden = torch.randn(6 if dist.get_rank() == 0 else 1, 1, 32, requires_grad=True)
    output, _ = layer(hidden)
    output.sum().backward()
    return {
        "shape": list(output.shape),
        "grads": [float(parameter.grad.abs().max()) for parameter in layer.experts.parameters()],
    }


def frozen_parameters() -> list[str]:
    """Freezes parts of a layer, and returns wrong gradients: other bits than before, or of frozen parameters."""
    differing: list[str] = []
    wanted: dict[str, torch.Tensor] = {}
    for part in ("nothing", "linear_fc1", "linear_fc2", "local_experts.0", "experts", "router"):
        layer = _one_layer()
        hidden = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(dist.get_rank())).requires_grad_()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(part not in name)
        layer(hidden)[0].sum().backward()
        found = {"hidden": hidden.grad, **{name: each.grad for name, each in layer.named_parameters()}}
        wanted = wanted or {name: each for name, each in found.items() if each is not None}
        for name, gradient in found.items():
            has_none = name != "hidden" and part in name
            if has_none != (gradient is None) or not (has_none or torch.equal(gradient, wanted[name])):
                differing.append(f"{part}: {name}")
    return [*differing, *([] if len(wanted) > 4 else ["too few"])]


def delayed_weight_gradients() -> dict[str, Any]:
    """Calls `backward_dw` after backward, as schedules do: it changes nothing."""
    layer = _one_layer()
    output, _ = layer(torch.randn(8, 2, 32))
    output.sum().backward()
    before = [parameter.grad.clone() for parameter in layer.experts.parameters()]
    layer.backward_dw()
    after = [parameter.grad for parameter in layer.experts.parameters()]
    return {"count": len(before), "same": all(torch.equal(one, other) for one, other in zip(before, after))}


# ---- distributed checkpoints ----


def _state(host: mg_models.Host, is_loading: bool = False, **how: Any) -> dict[str, Any]:
    """Returns the state of the unwrapped model, as DDP would add its name to the keys. how: further metadata."""
    metadata = {
        "dp_cp_group": mg_models.parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        **how,
    }
    model = host.model.sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": host.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}


def checkpoint(folder: str, saved_by: str, loaded_by: str) -> dict[str, Any]:
    """Trains two steps by one, and three by the other from its checkpoint, and compares them with five of stock."""
    first = mg_models.Host(2, saved_by, {"gemm": "host"})
    first.train(2)
    dist_checkpointing.save(_state(first), folder)
    second = mg_models.Host(2, loaded_by, {"gemm": "host"})
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load(_state(second, True), folder)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    whole = mg_models.Host(2, "stock")
    whole.train(2)
    found = {"resumed": second.train(3), "whole": whole.train(3)}
    return {**found, "gap": mg_models.gaps(second.parameters(), whole.parameters())}


def distributed_checkpoints(folder: str) -> dict[str, Any]:
    """Saves with the distributed optimizer after two steps, by stock and by Sluice. Returns keys that only one has, the
    largest gap of a tensor over its largest number, and the error of loading, which stock cannot do without Apex."""
    how = {"distrib_optim_sharding_type": "fully_reshardable"}  # the host's older default refuses to save
    saved, said = [], []
    for name in ("stock", "decorated"):
        host = mg_models.Host(2, name, {"gemm": "host"}, ddp={"use_distributed_optimizer": True})
        host.train(2)
        path = os.path.join(folder, name)
        if dist.get_rank() == 0:
            os.makedirs(path)
        dist.barrier()
        dist_checkpointing.save(_state(host, **how), path)
        saved.append(dist_checkpointing.load_plain_tensors(path))
        try:
            host.optimizer.load_state_dict(dist_checkpointing.load(_state(host, True, **how), path)["optimizer"])
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    stock, mine = ({name: each for name, each in one.items() if isinstance(each, torch.Tensor)} for one in saved)
    gaps = {
        name: float((stock[name] - mine[name]).abs().max() / stock[name].abs().max().clamp(min=1e-12))
        for name in stock.keys() & mine.keys()
    }
    return {
        "different": sorted(stock.keys() ^ mine.keys()),
        "names": sorted(stock),
        "gap": max(gaps.values()),
        "said": said,
    }


def checkpoint_keys() -> list[Any]:
    """Returns the global keys of stock and of Sluice, with their offsets and replica ids."""
    found = []
    for how in ("stock", "decorated"):
        state = mg_models.model_of(2, how).sharded_state_dict(
            metadata={"dp_cp_group": mg_models.parallel_state.get_data_parallel_group(with_context_parallel=True)}
        )
        found.append(
            sorted(
                [name, entry.key, list(map(int, getattr(entry, "global_offset", ()))), list(entry.replica_id)]
                for name, entry in state.items()
            )
        )
    return found


def rank_dies() -> str:
    """Ends rank 1 before its second forward: the error on rank 0 names it."""
    layer = _one_layer()
    layer(torch.randn(8, 2, 32))
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        layer(torch.randn(8, 2, 32))
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def options_differ() -> str:
    """Gives each rank another number of chunks."""
    try:
        mg_models.model_of(2, "decorated", {"chunks": 2 + dist.get_rank()})
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def one_switched_off() -> str:
    """Sets SLUICE=0 on rank 1 alone: rank 0 does not wait forever."""
    try:
        with environment(SLUICE="0") if dist.get_rank() == 1 else contextlib.nullcontext():
            mg_models.model_of(2, "decorated", {"timeout": 2})
    except SluiceError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def resharded(folder: str) -> dict[str, Any]:
    """Saves by Sluice with 2 EP ranks, and loads by stock and by Sluice with 2 and 4: first losses must be equal."""
    wanted = mg_models.Host(2, "decorated", {"gemm": "host"})
    wanted.train(1)
    dist_checkpointing.save(_state(wanted)["model"], folder)
    losses = {}
    for ep in (2, 4):
        for how in ("stock", "decorated"):
            host = mg_models.Host(ep, how, {"gemm": "host"})
            host.model.load_state_dict(dist_checkpointing.load(_state(host)["model"], folder))
            losses[f"{how} {ep}"] = host.train(1)["losses"][0]
    return losses
