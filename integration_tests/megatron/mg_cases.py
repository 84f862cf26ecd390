# SPDX-License-Identifier: Apache-2.0
"""Rank-side: tests in addition to a whole training: single layers, specs, checkpoints, and ranks that deviate."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cpu_shim
import mg_models
import sluice
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from mg_models import parallel_state
from sluice import megatron as ours
from sluice.adapters.megatron import offload
from sluice.adapters.megatron.layer import SluiceMoELayer


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
    return {**counts, "dense": _said(lambda: ours.with_sluice(block.layer_specs[1]))}


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
    options = {"plan": paths[dist.get_rank() % len(paths)], **options}
    return _said(lambda: mg_models.model_of(2, "decorated", options, num_layers=3, moe_layer_freq=[1, 0, 1]))


def switched_off() -> dict[str, Any]:
    """Trains a model with a decorated spec under SLUICE=0: the host runs it."""
    with environment(SLUICE="0"):
        host = mg_models.Host(2, "decorated")
        found = host.train(1)
    stock = mg_models.Host(2, "stock").train(1)
    return {"found": found, "stock": stock, "kept": [layer._sluice is None for layer in moe_layers(host.model)]}


class _OtherExperts(SequentialMLP):
    """Experts of an unknown class."""


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


def frozen_parameters() -> list[str]:
    """Freezes parts of a layer, and returns wrong gradients: other bits than before, or of frozen parameters. Rank 1
    has one token, so some experts have none. `backward_dw`, which schedules call, changes nothing."""
    differing: list[str] = []
    wanted: dict[str, torch.Tensor] = {}
    for part in ("nothing", "linear_fc1", "linear_fc2", "local_experts.0", "experts", "router"):
        layer, rank = _one_layer(), dist.get_rank()
        hidden = torch.randn(1 if rank else 6, 1, 32, generator=torch.Generator().manual_seed(rank)).requires_grad_()
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(part not in name)
        layer(hidden)[0].sum().backward()
        if wanted:
            layer.backward_dw()
        found = {"hidden": hidden.grad, **{name: each.grad for name, each in layer.named_parameters()}}
        wanted = wanted or {name: each for name, each in found.items() if each is not None}
        for name, gradient in found.items():
            has_none = name != "hidden" and part in name
            if has_none != (gradient is None) or not (has_none or torch.equal(gradient, wanted[name])):
                differing.append(f"{part}: {name}")
    return [*differing, *([] if len(wanted) > 4 else ["too few"])]


# ---- distributed checkpoints ----


def _state(host: mg_models.Host, is_loading: bool = False, **how: Any) -> dict[str, Any]:
    """Returns the state of the unwrapped model, as DDP would add its name to the keys. how: further metadata."""
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "chained_optim_avoid_prefix": True,
        **how,
    }
    model = host.model.sharded_state_dict(metadata=metadata)
    return {"model": model, "optimizer": host.optimizer.sharded_state_dict(model, is_loading, metadata=metadata)}


def checkpoint(folder: str) -> dict[str, Any]:
    """Trains two steps by stock, and three by Sluice from its checkpoint, and compares them with five of stock."""
    first = mg_models.Host(2, "stock")
    first.train(2)
    dist_checkpointing.save(_state(first), folder)
    second = mg_models.Host(2, "decorated", {"gemm": "host"})
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    loaded = dist_checkpointing.load(_state(second, True), folder)
    second.model.load_state_dict(loaded["model"])
    second.optimizer.load_state_dict(loaded["optimizer"])
    found = {"resumed": second.train(3), "whole": first.train(3)}
    return {**found, "gap": mg_models.gaps(second.parameters(), first.parameters())}


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


def one_switched_off() -> str:
    """Sets SLUICE=0 on rank 1 alone: rank 0 does not wait forever."""
    with environment(SLUICE="0") if dist.get_rank() == 1 else contextlib.nullcontext():
        return _said(lambda: mg_models.model_of(2, "decorated", {"timeout": 2}))


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


# ---- one rank deviates ----


def _said(action: Callable[[], Any]) -> str:
    """Returns the exception of a call, and its cause; "" if it raised none."""
    try:
        action()
    except Exception as error:
        cause = "" if error.__cause__ is None else f", from {error.__cause__!r}"
        return f"{type(error).__name__}: {error}{cause}"
    return ""


def bad_input(**changes: Any) -> dict[str, Any]:
    """Gives rank 1 hidden states of another width; then both continue."""
    layer = _one_layer(**changes)
    said = _said(lambda: layer(torch.randn(8, 2, 36 if dist.get_rank() == 1 else 32)))
    output, _ = layer(torch.randn(8, 2, 32))
    return {"said": said, "finite": bool(output.isfinite().all())}


def expert_raises() -> dict[str, Any]:
    """Makes an expert of rank 1, which is called because it has a hook, raise in the first of three forwards."""
    layer = _one_layer()

    def stumble(*_: Any) -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the hook's own words")

    hooks = [expert.register_forward_hook(stumble) for expert in layer.experts.local_experts]
    said = [_said(lambda: layer(torch.randn(8, 2, 32)))]
    for hook in hooks:
        hook.remove()
    said.append(_said(lambda: layer(torch.randn(8, 2, 32))))
    output, _ = layer(torch.randn(8, 2, 32))
    return {"said": said, "finite": bool(output.isfinite().all())}


def models_differ() -> str:
    """Gives rank 1 wider experts."""
    return _said(lambda: mg_models.model_of(2, "decorated", moe_ffn_hidden_size=48 + 8 * dist.get_rank()))


def _built(config: Any, policy: str, is_other: bool = False) -> dict[str, Any]:
    """Builds a model, and returns the error, what was printed, and which layers Megatron runs. is_other: its experts
    are of an unknown class."""
    spec = ours.with_sluice(mg_models.spec_of(config, "stock", {}), on_unsupported=policy)
    if is_other:
        _with_experts(spec, _OtherExperts)
    made: list[Any] = []
    sizes = {"vocab_size": mg_models.VOCABULARY, "max_sequence_length": mg_models.SEQUENCE}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        said = _said(
            lambda: made.append(mg_models.GPTModel(config=config, transformer_layer_spec=spec, **sizes))  # fmt: skip
        )
    kept = [layer._sluice is None for model in made for layer in moe_layers(model)]
    return {"said": said, "printed": printed.getvalue(), "kept": kept}


def other_experts(policy: str) -> dict[str, Any]:
    """Gives rank 1 alone experts of an unknown class."""
    return _built(mg_models.model_of(2).config, policy, is_other=dist.get_rank() == 1)


def split_experts(policy: str) -> dict[str, Any]:
    """Splits experts over two tensor-parallel ranks: refused, or trained by the host."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(2, 1, expert_model_parallel_size=1, expert_tensor_parallel_size=2)
    try:
        mg_models.model_parallel_cuda_manual_seed(1234)
        sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 2}
        return _built(mg_models.config_of(1, **sizes), policy)
    finally:
        parallel_state.destroy_model_parallel()


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _told(host: mg_models.Host, microbatches: int = 2) -> dict[str, Any]:
    """Returns the error of a step, and how soon it came."""
    began = time.monotonic()
    return {"said": _said(lambda: host.train(1, microbatches)), "s": time.monotonic() - began}


def dies_in_training(where: str) -> dict[str, Any]:
    """Kills rank 1 in the forward or backward of the second step."""
    host = mg_models.Host(2, "decorated", {"gemm": "host"})
    host.train(1)
    if dist.get_rank() == 1:
        first, second = moe_layers(host.model)
        if where == "forward":
            second.register_forward_pre_hook(_die)
        else:  # after the second layer's backward
            first.register_full_backward_pre_hook(_die)
    return _told(host)


def dies_in_a_stage(folder: str) -> dict[str, Any]:
    """Kills rank 3, of the last of two stages, in the second step. A rank that gets an error ends, as a script would;
    rank 2, of the same stage, writes its error into the folder, the others return theirs."""
    host = mg_models.Host(2, "decorated", {"gemm": "host"}, stages=2, num_layers=4)
    host.train(1, microbatches=4)
    if dist.get_rank() == 3:
        moe_layers(host.model)[0].register_forward_pre_hook(_die)
    told = _told(host, 4)
    if dist.get_rank() == 2:
        (Path(folder) / "told").write_text(told["said"])
        os._exit(1)
    return told


# ---- Megatron's --optimizer-cpu-offload, by torch's AdamW and by the library ----


def _offloading(how: str, options: dict[str, Any], fraction: float) -> mg_models.Host:
    host = mg_models.Host(2, how, options)
    config = OptimizerConfig(
        optimizer="adam",
        lr=2e-3,
        weight_decay=0.01,
        clip_grad=1.0,
        optimizer_cpu_offload=True,
        optimizer_offload_fraction=fraction,
        use_torch_optimizer_for_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
    )
    with cpu_shim.parameters_on_a_device():
        host.optimizer = get_megatron_optimizer(config, host.parts)
    return host


def offloaded(fraction: float) -> dict[str, Any]:
    """Returns losses, norms and parameters of both, the classes in host memory, and the class named in checkpoints."""
    host = _offloading("stock", {}, fraction)
    first = host.parameters()
    stock, wanted = host.train(3), host.parameters()
    try:
        mine = _offloading("decorated", {"gemm": "host", "optimizer": True}, fraction)
        found = mine.train(3)
    finally:
        offload.uninstall()
    hybrids = [each.optimizer for each in getattr(mine.optimizer, "chained_optimizers", [mine.optimizer])]
    return {
        "stock": stock,
        "sluice": found,
        "gap": mg_models.gaps(wanted, mine.parameters()),
        "moved": mg_models.gaps(wanted, first),
        "kinds": sorted({type(each).__name__ for hybrid in hybrids for each in hybrid.cpu_optimizers}),
        "offloaded": sum(len(hybrid.cpu_optimizers) for hybrid in hybrids),
        "of": sum(len(group["params"]) for hybrid in hybrids for group in hybrid.param_groups),
        "named": sorted({hybrid.defaults["cpu_optimizer_cls"].__module__ for hybrid in hybrids}),
    }
