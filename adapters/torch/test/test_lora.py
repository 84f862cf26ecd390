# SPDX-License-Identifier: Apache-2.0
"""Compares adapters of experts with autograd's results for W + s B A. The layer never forms that sum."""

import pytest
import torch
from sluice.adapters.torch import Lora, MoeConfig, MoeLayer, StackedLayer
from sluice.errors import InvalidArgument
from torch.utils.checkpoint import checkpoint

EXPERTS, MODEL, HIDDEN, TOP_K, RANK, TOKENS = 4, 24, 32, 2, 3, 40
SCALES = {"la1": 2.0, "la2": 0.5}


def views(tensors):
    up, down = tensors
    halves = (None, None) if up is None else up.chunk(2, 1)
    return (*halves, down)


def make(context, kind=StackedLayer, **options):
    shape = {"model_width": MODEL, "hidden_width": HIDDEN, "num_experts": EXPERTS, "top_k": TOP_K}
    config = MoeConfig(**shape, activation="silu", gated=True, **{"lora_rank": RANK, **options})
    return kind(context, config, views=views) if kind is StackedLayer else kind(context, config)


class Model:
    """Stacks of experts, and factors as PEFT stores them: A [r E, in] by expert, B [out, r E] with E fastest."""

    def __init__(self, dtype=torch.float32, factor_dtype=torch.float32):
        generator = torch.Generator().manual_seed(1)

        def made(*shape):
            return torch.randn(shape, generator=generator) * 0.2

        self.stacks = [made(EXPERTS, 2 * HIDDEN, MODEL).to(dtype), made(EXPERTS, MODEL, HIDDEN).to(dtype)]
        widths = {"a1": (RANK * EXPERTS, MODEL), "b1": (2 * HIDDEN, RANK * EXPERTS)}
        widths |= {"a2": (RANK * EXPERTS, HIDDEN), "b2": (MODEL, RANK * EXPERTS)}
        self.factors = {name: made(*shape).to(factor_dtype).requires_grad_() for name, shape in widths.items()}
        self.tokens = made(TOKENS, MODEL).to(dtype).requires_grad_()
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        self.weights = torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()

    def stacked(self):
        """Returns [E, r, in], and [E, out, r] as a view without a stride of 1."""
        one = {name: a.view(EXPERTS, RANK, -1) for name, a in self.factors.items() if name[0] == "a"}
        two = {name: b.view(-1, RANK, EXPERTS).permute(2, 0, 1) for name, b in self.factors.items() if name[0] == "b"}
        return {**one, **two}

    def lora(self):
        f = self.stacked()
        gate, up = f["b1"].chunk(2, 1)
        factors = {"la1": f["a1"], "lb1": gate, "lb3": up, "la2": f["a2"], "lb2": f["b2"]}
        return Lora(factors, SCALES)

    def dense(self):
        """Computes in double precision."""
        f = {name: factor.double() for name, factor in self.stacked().items()}
        up = self.stacks[0].double() + SCALES["la1"] * f["b1"] @ f["a1"]
        down = self.stacks[1].double() + SCALES["la2"] * f["b2"] @ f["a2"]
        tokens, out = self.tokens.double(), torch.zeros(TOKENS, MODEL, dtype=torch.float64)
        for e in range(EXPERTS):
            token, k = (self.ids == e).nonzero(as_tuple=True)
            gate, value = (tokens[token] @ up[e].t()).chunk(2, 1)
            part = (torch.nn.functional.silu(gate) * value) @ down[e].t()
            out = out.index_add(0, token, part * self.weights[token, k].double().unsqueeze(1))
        return out

    def inputs(self):
        return [self.tokens, self.weights, *self.factors.values()]

    def step(self, out):
        for tensor in self.inputs():
            tensor.grad = None
        out.double().square().sum().backward()
        return [out.detach().double(), *(tensor.grad.double() for tensor in self.inputs())]


def agree(model, got, tolerance):
    want = model.step(model.dense())
    for number, (mine, theirs) in enumerate(zip(got, want)):
        error = (mine - theirs).abs().max() / theirs.abs().max()
        assert error <= tolerance, (number, error)


def test_Stacks_WithAdaptersAsPeftHasThem_MatchTheDenseLayer(context):
    model, layer = Model(), make(context)
    agree(model, model.step(layer(model.tokens, model.ids, model.weights, model.stacks, model.lora())), 1e-5)
    assert all(stack.grad is None for stack in model.stacks)


@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.bfloat16])
def test_Bf16Layer_WithFactorsOfEitherDtype_IsNearTheDenseLayer(context, factor_dtype):
    model = Model(torch.bfloat16, factor_dtype)
    layer = make(context, dtype=torch.bfloat16)
    got = model.step(layer(model.tokens, model.ids, model.weights, model.stacks, model.lora()))
    assert model.factors["b1"].grad.dtype is factor_dtype
    agree(model, got, 4e-2)  # ten roundings to 8 bits between an input and its gradient


def test_ExpertsOneByOne_WithAdapters_MatchTheDenseLayer(context):
    model, layer = Model(), make(context, MoeLayer)
    gate, up = model.stacks[0].chunk(2, 1)
    params = [{"w1": gate[e], "w3": up[e], "w2": model.stacks[1][e]} for e in range(EXPERTS)]
    agree(model, model.step(layer(model.tokens, model.ids, model.weights, params, model.lora())), 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_Checkpointed_WithAdapters_HasTheSameBits(context, use_reentrant):
    model, layer = Model(), make(context)

    def run(tokens, weights):
        return layer(tokens, model.ids, weights, model.stacks, model.lora())

    plain = model.step(run(model.tokens, model.weights))
    again = model.step(checkpoint(run, model.tokens, model.weights, use_reentrant=use_reentrant))
    assert all(torch.equal(one, two) for one, two in zip(plain, again))


def test_CallsWithAndWithoutAdapters_InTurns_AreEachTheirOwn(context):
    model, layer, plain = Model(), make(context), make(context, lora_rank=0)
    without = plain(model.tokens, model.ids, model.weights, model.stacks)
    with_them = layer(model.tokens, model.ids, model.weights, model.stacks, model.lora())
    assert torch.equal(layer(model.tokens, model.ids, model.weights, model.stacks), without)
    assert torch.equal(layer(model.tokens, model.ids, model.weights, model.stacks, model.lora()), with_them)
    assert not torch.equal(with_them, without)


def test_FewOfTheFactorsTrained_OthersHaveNoGradient(context):
    model, layer = Model(), make(context)
    whole = model.step(layer(model.tokens, model.ids, model.weights, model.stacks, model.lora()))
    for factor in model.factors.values():
        factor.grad = None
    for name in ("a1", "b2"):
        model.factors[name].requires_grad_(False)
    layer(model.tokens, model.ids, model.weights, model.stacks, model.lora()).double().square().sum().backward()
    assert model.factors["a1"].grad is None and model.factors["b2"].grad is None
    for name, want in zip(("b1", "a2"), whole[4:6]):
        assert torch.equal(model.factors[name].grad.double(), want)


def refused(context, text, lora=None, stacks=None, **options):
    model, layer = Model(), make(context, **options)
    given = model.lora() if lora is None else lora(model.lora())
    with pytest.raises(InvalidArgument, match=text):
        out = layer(model.tokens, model.ids, model.weights, stacks or model.stacks, given)
        out.sum().backward()
    good = make(context)
    agree(model, model.step(good(model.tokens, model.ids, model.weights, model.stacks, model.lora())), 1e-5)


def test_BadAdapters_AreRefusedByName(context):
    def changed(name, factor):
        return lambda lora: lora._replace(factors={**lora.factors, name: factor(lora.factors)})

    refused(context, "give its MoeConfig lora_rank", lora_rank=0)
    refused(context, "la4 is not a factor of an adapter", changed("la4", lambda f: f["la1"]))
    refused(
        context, r"la1 has shape \[3, 3, 24\]: a factor is stacked over the 4", changed("la1", lambda f: f["la1"][:3])
    )
    refused(context, "lb1 has no scale", lambda lora: lora._replace(scales={"lb1": 1.0}))


def test_TrainedWeights_WithLoraRank_AreRefused(context):
    trained = [stack.requires_grad_() for stack in Model().stacks]
    refused(context, "grad_params.w1 is given, but with lora_rank 3 the weights are frozen", stacks=trained)


def test_FactorChangedBeforeItsBackward_IsRefusedByTorch(context):
    model, layer = Model(), make(context)
    out = layer(model.tokens, model.ids, model.weights, model.stacks, model.lora())
    with torch.no_grad():
        model.factors["b2"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
