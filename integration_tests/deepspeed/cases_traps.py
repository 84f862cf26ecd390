# SPDX-License-Identifier: Apache-2.0
"""Rank-side: traps of the host, one function for each. The functions assert here, and return values for the comparison
of ranks."""

from __future__ import annotations

import os
import warnings
from typing import Any

import ds_models as models
import sluice
import torch
import torch.distributed as dist
from deepspeed.moe.sharded_moe import MOELayer
from ds_models import SLUICE, build, ds_config, engine
from sluice.adapters.deepspeed.moe.layer import SluiceMOELayer


def _swapped(layers: list[dict[str, Any]], sluice_section: dict[str, Any] | None = None, **config: Any) -> Any:
    return engine(build(layers), ds_config(**config), {**SLUICE, **(sluice_section or {})})


def _one_step(host: Any, step: int = 0, length: int | None = None) -> torch.Tensor:
    torch.manual_seed(step)
    x, target = models.batch(step, length)
    loss = host(x.to(next(host.module.parameters()).dtype), target)
    host.backward(loss)
    return loss.detach()


def _layer(host: Any, index: int = 0) -> Any:
    return host.module.moes[index].deepspeed_moe


def idle_experts_get_zero_gradients(expert: str) -> list[bool]:
    """Trap 1: all tokens go to expert 0, which rank 0 owns."""
    host = _swapped([{"expert": expert, "drop_tokens": False}])
    layer = _layer(host)
    with torch.no_grad():
        layer.gate.wg.weight.zero_()  # with equal logits argmax takes expert 0
    host.module(*models.batch(0)).backward()  # not through the engine, whose reduction would fill in zeros
    zero = []
    for module in layer.experts.deepspeed_experts:
        for parameter in module.parameters():
            assert parameter.grad is not None and parameter.grad.shape == parameter.shape
        zero.append(all(not parameter.grad.any() for parameter in module.parameters()))
    host.sluice.unswap()
    return zero


def pointers_are_read_afresh() -> None:
    """Trap 2: ZeRO re-points `param.data`. Forward and backward must read the values at the new address."""
    host = _swapped([{"drop_tokens": False}])
    experts = list(_layer(host).experts.deepspeed_experts.parameters())
    x, target = models.batch(0)
    first = host(x, target)
    old = [parameter.data for parameter in experts]
    for parameter in experts:
        parameter.data = parameter.data.clone()
    for tensor in old:
        tensor.fill_(float("nan"))
    host.backward(first)  # the forward must have saved parameters, not addresses
    assert all(torch.isfinite(parameter.grad).all() for parameter in experts)
    again = host(x, target)
    assert torch.allclose(first, again, rtol=1e-6)
    for parameter in experts:
        parameter.data = parameter.data * 0.5
    assert not torch.equal(host(x, target), again)
    host.sluice.unswap()


def nothing_is_added_or_replaced(layers: list[dict[str, Any]]) -> None:
    """Trap 3, and unswap: checks names, objects, buffers and classes before, during and after the swap."""
    model = build(layers)
    before = _shape_of(model)
    host = engine(model, ds_config(), SLUICE)
    during = _shape_of(model)
    assert before == during
    _one_step(host)
    host.step()
    assert _shape_of(model) == before
    assert all(type(moe.deepspeed_moe) is SluiceMOELayer for moe in model.moes)
    assert all(isinstance(moe.deepspeed_moe, MOELayer) for moe in model.moes)
    attributes = [set(vars(moe.deepspeed_moe)) for moe in model.moes]
    host.sluice.unswap()
    host.sluice.unswap()
    assert _shape_of(model) == before
    for moe, names in zip(model.moes, attributes):
        assert type(moe.deepspeed_moe) is MOELayer
        assert "_sluice" not in vars(moe.deepspeed_moe)
        assert set(vars(moe.deepspeed_moe)) == names - {"_sluice"}
    _one_step(host, 1)


def _shape_of(model: Any) -> Any:
    return (
        [(name, id(parameter)) for name, parameter in model.named_parameters()],
        [(name, id(buffer)) for name, buffer in model.named_buffers()],
        [(name, type(module).__mro__[-3:]) for name, module in model.named_modules()],
        [(key, tuple(value.shape)) for key, value in model.state_dict().items()],
    )


def no_random_number_of_its_own() -> None:
    """Trap 4: Sluice uses no random numbers of its own."""
    host = _swapped([{"k": 3, "expert": "relu"}, {"k": 3, "expert": "tuple"}])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    host.backward(host(*models.batch(0)))
    assert torch.equal(before, torch.random.get_rng_state())
    host.sluice.unswap()


def hook_after_swap_fires() -> None:
    """Trap 5: after a hook is set on an expert, the expert is called as a module."""
    host = _swapped([{"k": 2}])
    layer = _layer(host)
    x, target = models.batch(0)
    torch.manual_seed(1)
    plain = host(x, target)
    assert sluice.stats(layer)["layers"][0]["computed_by"] == "sluice"
    rows: list[list[int]] = []
    handles = [
        expert.register_forward_hook(lambda _m, args, _o: rows.append(list(args[0].shape)))
        for expert in layer.experts.deepspeed_experts
    ]
    torch.manual_seed(1)
    hooked = host(x, target)
    assert sluice.stats(layer)["layers"][0]["computed_by"] == "host modules"
    assert rows and all(shape[:2] == [1, 1] and shape[3] == models.WIDTH for shape in rows)
    assert torch.allclose(plain, hooked, rtol=1e-6)
    for handle in handles:
        handle.remove()
    torch.manual_seed(1)
    assert torch.equal(host(x, target), plain)
    assert sluice.stats(layer)["layers"][0]["computed_by"] == "sluice"
    host.sluice.unswap()


def hook_on_one_rank() -> str:
    """Returns the error when only rank 0 hooks an expert, a difference that the adapter must explain."""
    host = _swapped([{"k": 2}])
    layer = _layer(host)
    handle = None
    if dist.get_rank() == 0:
        handle = layer.experts.deepspeed_experts[0].register_forward_hook(lambda *_: None)
    try:
        layer(torch.randn(8, models.WIDTH), None)
        raise AssertionError("no error")
    except RuntimeError as error:
        text = f"{type(error).__name__}: {error}"
    if handle is not None:
        handle.remove()
    layer(torch.randn(8, models.WIDTH), None)
    host.sluice.unswap()
    return text


def container_hooked_after_the_swap(policy: str) -> str:
    """Trap 5: the error of each rank when rank 1 hooks the container of experts, which is not called."""
    host = _swapped([{}], {"on_unsupported": policy})
    layer = _layer(host)
    x = torch.randn(8, models.WIDTH)
    layer(x, None)
    hook = layer.experts.register_forward_hook(lambda *_: None) if dist.get_rank() == 1 else None
    told = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            try:
                layer(x, None)
            except RuntimeError as error:
                told = f"{type(error).__name__}: {error}"
    said = [str(warning.message) for warning in caught if "sluice:" in str(warning.message)]
    assert len(said) <= 1, said
    if hook is not None:
        hook.remove()
    layer(x, None)
    host.sluice.unswap()
    return told or "".join(said)


def hooked_expert_runs_whole() -> None:
    """Without a configured n, a hooked module gets all rows in one call."""
    host = _swapped([{"ep_size": 1, "expert": "tuple"}], {"chunks": None})
    layer = _layer(host)
    calls: list[int] = []
    layer.experts.deepspeed_experts[0].register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        layer.gate.wg.weight.zero_()
        for _ in range(20):
            layer(torch.randn(16, models.WIDTH), None)
    assert len(calls) == 20, calls
    host.sluice.unswap()


def attributes_as_stock() -> None:
    """Trap 6: l_aux, exp_counts and the times are those of stock."""
    host = _swapped([{}], wall_clock_breakdown=True)
    layer = _layer(host)
    x, target = models.batch(0)
    host(x, target)
    assert layer.exp_counts.dtype == torch.int64 and layer.exp_counts.shape == (4,)
    assert layer.l_aux.shape == () and layer.l_aux.dtype == torch.float32 and not layer.l_aux._is_view()
    layer.l_aux += 1.0  # Megatron changes l_aux in place
    assert layer.time_moe > 0 and layer.time_falltoall > 0 and layer.time_salltoall > 0 and layer.gate.gate_time > 0
    layer(x, torch.ones(x.shape[0] * x.shape[1]))
    assert layer.exp_counts.dtype == torch.float32  # exp_counts has the dtype of used_token
    host.sluice.unswap()


def sum_in_f32_and_zero_for_dropped(dtype: str) -> None:
    """Trap 7, with ep_size 1: outputs are f32 sums that are cast once, and dropped tokens are exact zeros."""
    kind = getattr(torch, dtype)
    config = {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    host = _swapped([{"k": 2, "ep_size": 1, "capacity_factor": 0.4, "min_capacity": 1}], **config)
    layer = _layer(host)
    torch.manual_seed(3)
    x = (torch.randn(24, models.WIDTH) + 0.3).to(kind)
    torch.manual_seed(4)
    with torch.no_grad():
        out = layer(x, None)
        torch.manual_seed(4)
        _, _, _, ids, _, weights, _ = layer.gate(x, None, True, False)
        total = torch.zeros(24, models.WIDTH)
        for k in range(2):
            for token in range(24):
                if ids[k, token] >= 0:
                    expert = layer.experts.deepspeed_experts[int(ids[k, token])]
                    total[token] += expert(x[token]).float() * weights[k, token]
    dropped = (ids < 0).all(dim=0)
    assert dropped.any() and not out[dropped].any()
    assert out.dtype == kind
    ulp = 1e-6 if dtype == "float32" else 2**-7
    assert torch.allclose(out.float(), total, rtol=ulp, atol=ulp * total.abs().max().item())
    host.sluice.unswap()


def drops_as_stock(capacity_factor: float, k: int) -> list[int]:
    """Trap 8: the same tokens are dropped."""
    layers = [{"k": k, "capacity_factor": capacity_factor, "min_capacity": 1, "expert": "plain_linears"}]
    zeros = []
    for section in (None, SLUICE):
        host = engine(build(layers), ds_config(), section)
        torch.manual_seed(9)
        out, _, _ = host.module.moes[0](torch.randn(31, models.WIDTH) + 0.2)
        zeros.append((out == 0).all(dim=1).nonzero().flatten().tolist())
        if section is not None:
            host.sluice.unswap()
    assert zeros[0] == zeros[1]
    return zeros[0]


def not_for_compilers() -> None:
    """Trap 9: dynamo does not compile the layer."""
    assert getattr(SluiceMOELayer.forward, "_torchdynamo_disable", False)


class Straight(models.Model):
    """Two layers without a loop, because dynamo skips a frame whose graph breaks inside a loop."""

    def forward(self, x: torch.Tensor, target: torch.Tensor, used: torch.Tensor | None = None) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        out, first_aux, _ = self.moes[0](h)
        h = h + out
        out, second_aux, _ = self.moes[1](h)
        loss = torch.nn.functional.mse_loss(self.last(h + out), target, reduction="sum") / 64
        return loss + 0.01 * (first_aux + second_aux)


def _straight() -> Straight:
    model = build([{"k": 2}, {"expert": "tuple"}])
    model.__class__ = Straight
    return model


def compiled(how: str) -> list[Any]:
    """Trap 9: compiles a model around the layers. Returns [losses of stock, losses, graphs, passes of Sluice].

    The harness disables dynamo while the host is imported, so that Inductor does not compile helpers of its gate.
    """
    stock = engine(_straight(), ds_config())
    losses: list[list[float]] = [[], []]
    for step in range(4):
        losses[0].append(float(_one_step(stock, step)))
        stock.step()
    stock.destroy()
    graphs: list[int] = []

    def eager(module: Any, _inputs: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    before = os.environ.pop("TORCHDYNAMO_DISABLE", None)
    disabled, torch._dynamo.config.disable = torch._dynamo.config.disable, False
    try:
        model = _straight()
        host = engine(torch.compile(model, backend=eager) if how == "torch" else model, ds_config(), SLUICE)
        if how == "engine":
            host.compile(backend=eager)
        assert all(type(moe.deepspeed_moe) is SluiceMOELayer for moe in model.moes)
        for step in range(4):
            losses[1].append(float(_one_step(host, step)))
            host.step()
        passes = sluice.stats(model.moes[0])["contexts"][0]["num_passes"]
        host.sluice.unswap()
    finally:
        torch._dynamo.config.disable = disabled
        if before is not None:
            os.environ["TORCHDYNAMO_DISABLE"] = before
        torch._dynamo.reset()
    return [*losses, graphs, passes]


def residual_stays_torchs() -> None:
    """Trap 12: torch computes the residual part."""
    host = _swapped([{"use_residual": True}])
    moe = host.module.moes[0]
    calls: list[int] = []
    moe.mlp.register_forward_hook(lambda *_: calls.append(1))
    host(*models.batch(0))
    assert calls == [1] and sluice.stats(moe)["layers"][0]["computed_by"] == "sluice"
    host.sluice.unswap()


def autocast_keeps_no_copy() -> list[str]:
    """Trap 13: rows have autocast's dtype, and autograd saves the parameters and not casts of them."""
    host = _swapped([{"k": 2}])
    layer = _layer(host)
    kept: list[torch.Tensor] = []
    x = torch.randn(12, models.WIDTH)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        out = layer(x, None)
    assert out.dtype == torch.bfloat16
    weights = {tuple(p.shape) for p in layer.experts.parameters() if p.dim() == 2}
    casts = [t for t in kept if t.dtype == torch.bfloat16 and tuple(t.shape) in weights]
    assert not casts
    out.float().sum().backward()
    gradients = {str(p.grad.dtype) for p in layer.experts.parameters()}
    host.sluice.unswap()
    return sorted(gradients)


def no_grad_saves_nothing() -> None:
    """Trap 14: a forward under no_grad saves nothing."""
    host = _swapped([{}])
    layer = _layer(host)
    host.eval()
    with torch.no_grad():
        out = layer(torch.randn(12, models.WIDTH), None)
    assert not out.requires_grad
    assert sluice.stats(layer)["contexts"][0]["saved_bytes"] == 0
    host.sluice.unswap()


def evaluates_as_stock(k: int) -> Any:
    """Trap 14: eval has its own capacity factor, and the host's gate uses the same random numbers.

    [tokens dropped in training, in eval, whether eval drew random numbers]
    """
    layers = [
        {"k": k, "capacity_factor": 1.1, "eval_capacity_factor": 0.35, "min_capacity": 1, "expert": "plain_linears"}
    ]
    torch.manual_seed(9)
    x = torch.randn(31, models.WIDTH) + 0.2
    found = []
    for section in (None, SLUICE):
        host = engine(build(layers), ds_config(), section)
        outputs = []
        for mode in (True, False):
            host.train(mode)
            torch.manual_seed(1)
            before = torch.random.get_rng_state()
            with torch.no_grad():
                outputs.append(host.module.moes[0](x)[0])
        found.append((outputs, before, torch.random.get_rng_state()))
        if section is not None:
            host.sluice.unswap()
    (stock, before, after), (swapped, _, after_too) = found
    assert torch.equal(after, after_too)
    dropped = []
    for mine, other in zip(swapped, stock):
        assert torch.equal((mine == 0).all(dim=1), (other == 0).all(dim=1))
        assert torch.allclose(mine, other, rtol=1e-5, atol=1e-6)
        dropped.append(int((mine == 0).all(dim=1).sum()))
    return [*dropped, not torch.equal(before, after)]


def adapters_on_experts(expert: str, before: bool) -> dict[str, Any]:
    """Runs PEFT's LoRA on experts' Linears in each state (lora_states.py). before: add an adapter before the swap."""
    import lora_states  # imports transformers, which takes a second on each rank of the many files that import this one

    model = build([{"k": 2, "expert": expert}])
    if before:
        lora_states.add(model.moes[0].deepspeed_moe.experts, "earlier")
    host = engine(model, ds_config(), SLUICE)
    layer = _layer(host)
    x, target = models.batch(0)

    def call() -> tuple[torch.Tensor, str]:
        torch.manual_seed(1)
        loss = model(x, target)
        return loss, sluice.stats(layer)["layers"][0]["computed_by"]

    found = lora_states.compare(layer.experts, list(layer.experts.deepspeed_experts), call)
    host.sluice.unswap()
    return found
