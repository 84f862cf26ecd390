# SPDX-License-Identifier: Apache-2.0
"""Tests layers whose parameters are stacked over experts, or packed: adapters against autograd's results for W + s B A,
a sum that the layer never forms; codes of 4 and 8 bits against decoded weights; members in one tensor against separate
ones."""

import pytest
import torch
from layer_cases import reference
from sluice.adapters.torch import (
    Context,
    ContextOptions,
    Format,
    Lora,
    MoeConfig,
    MoeLayer,
    PackedLayer,
    StackedLayer,
    check_weights,
    dequantise,
    quantise,
)
from sluice.errors import InvalidArgument, Unsupported
from torch.utils.checkpoint import checkpoint

EXPERTS, TOP_K, RANK, TOKENS = 4, 2, 3, 40
SCALES = {"la1": 2.0, "la2": 0.5}
# Widths as odd as each format lets them be.
FORMS = {"mxfp4": (Format("mxfp4"), 64, 96), "fp8": (Format("fp8"), 161, 137)}
FORMS |= {"int8": (Format("int8"), 75, 45), "int4": (Format("int4", 32), 70, 34)}
MEMBERS = ("w1", "w3", "w2", "b1", "b3", "b2")


def halves(tensor):
    return (None, None) if tensor is None else tensor.chunk(2, 1)


class Model:
    """Stacks of experts, gate above up; with a kind also as codes and scales. Factors as PEFT stores them: A [r E, in]
    by expert, B [out, r E] with E fastest."""

    def __init__(self, kind=None, dtype=torch.float32, factor_dtype=torch.float32, bias=False):
        self.form, self.model, self.hidden = FORMS[kind] if kind else (None, 24, 32)
        self.dtype, self.bias = dtype, bias
        generator = torch.Generator().manual_seed(1)

        def made(*shape):
            return torch.randn(shape, generator=generator) * 0.2

        shapes = [(EXPERTS, self.hidden, self.model)] * 2 + [(EXPERTS, self.model, self.hidden)]
        matrices = [made(*shape) + n * (kind is not None) for n, shape in zip((0, 1, 0), shapes)]
        if kind is not None:
            # Blocks of rows restart at up, as in a checkpoint with separate gate and up.
            gate, up, self.down = (quantise(matrix, self.form) for matrix in matrices)
            self.up = [torch.cat(pair, 1) for pair in zip(gate, up)]
            matrices = [dequantise(*each, self.form, dtype) for each in (gate, up, self.down)]
        gate, up, down = (matrix.to(dtype) for matrix in matrices)
        self.stacks = [torch.cat((gate, up), 1), down]
        sizes = (2 * self.hidden, self.model) if bias else ()
        self.biases = [made(EXPERTS, size).requires_grad_() for size in sizes]
        widths = {"a1": (RANK * EXPERTS, self.model), "b1": (2 * self.hidden, RANK * EXPERTS)}
        widths |= {"a2": (RANK * EXPERTS, self.hidden), "b2": (self.model, RANK * EXPERTS)}
        self.factors = {name: made(*shape).to(factor_dtype).requires_grad_() for name, shape in widths.items()}
        self.tokens = made(TOKENS, self.model).to(dtype).requires_grad_()
        self.ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        self.weights = torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()

    def make(self, context, kind=StackedLayer, is_coded=False, unpack=None, **options):
        config = MoeConfig(
            model_width=self.model, hidden_width=self.hidden, num_experts=EXPERTS, top_k=TOP_K, activation="silu",
            gated=True, bias=self.bias, dtype=self.dtype, **{"lora_rank": RANK, **options},
            weight_format=self.form.name if is_coded else "plain", weight_block=self.form.block if is_coded else 0,
        )  # fmt: skip

        def views(tensors):
            up, down, *rest = tensors
            biases = [*halves(rest[0]), rest[1]] if self.bias else []
            return [*halves(up), down, *biases, *([*halves(rest[-2]), rest[-1]] if is_coded else [])]

        if kind is StackedLayer:
            return StackedLayer(context, config, views=views, num_scales=2 if is_coded else 0)
        return kind(context, config) if unpack is None else kind(context, config, unpack=unpack)

    def params(self, is_coded=False):
        if is_coded:
            return [self.up[0], self.down[0], *self.biases, self.up[1], self.down[1]]
        return [*self.stacks, *self.biases]

    def stacked(self):
        """Returns [E, r, in], and [E, out, r] as a view without a stride of 1."""
        one = {name: a.view(EXPERTS, RANK, -1) for name, a in self.factors.items() if name[0] == "a"}
        two = {name: b.view(-1, RANK, EXPERTS).permute(2, 0, 1) for name, b in self.factors.items() if name[0] == "b"}
        return {**one, **two}

    def lora(self):
        f = self.stacked()
        gate, up = f["b1"].chunk(2, 1)
        return Lora({"la1": f["a1"], "lb1": gate, "lb3": up, "la2": f["a2"], "lb2": f["b2"]}, SCALES)

    def dense(self):
        """Computes in double precision."""
        f = {name: factor.double() for name, factor in self.stacked().items()}
        gate, value = (self.stacks[0].double() + SCALES["la1"] * f["b1"] @ f["a1"]).chunk(2, 1)
        down = self.stacks[1].double() + SCALES["la2"] * f["b2"] @ f["a2"]
        experts = [{"w1": gate[e], "w3": value[e], "w2": down[e]} for e in range(EXPERTS)]
        return reference(self.tokens.double(), self.ids, self.weights.double(), experts, "silu")

    def call(self, layer, is_coded=False):
        return layer(self.tokens, self.ids, self.weights, self.params(is_coded), self.lora())

    def step(self, out):
        """Returns the output, and gradients of tokens, route weights, factors and biases."""
        leaves = [self.tokens, self.weights, *self.factors.values(), *self.biases]
        for tensor in leaves:
            tensor.grad = None
        out.double().square().sum().backward()
        return [out.detach(), *(tensor.grad for tensor in leaves)]


def agree(model, got, tolerance):
    want = model.step(model.dense())
    for number, (mine, theirs) in enumerate(zip(got, want)):
        error = (mine.double() - theirs.double()).abs().max() / theirs.double().abs().max()
        assert error <= tolerance, (number, error)


# ---- adapters ----


def test_Stacks_WithAdaptersAsPeftHasThem_MatchTheDenseLayer(context):
    model = Model()
    agree(model, model.step(model.call(model.make(context))), 1e-5)
    assert all(stack.grad is None for stack in model.stacks)


@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.bfloat16])
def test_Bf16Layer_WithFactorsOfEitherDtype_IsNearTheDenseLayer(context, factor_dtype):
    model = Model(dtype=torch.bfloat16, factor_dtype=factor_dtype)
    got = model.step(model.call(model.make(context)))
    assert model.factors["b1"].grad.dtype is factor_dtype
    agree(model, got, 4e-2)  # ten roundings to 8 bits between an input and its gradient


def test_ExpertsOneByOne_WithAdapters_MatchTheDenseLayer(context):
    model = Model()
    gate, up = model.stacks[0].chunk(2, 1)
    params = [{"w1": gate[e], "w3": up[e], "w2": model.stacks[1][e]} for e in range(EXPERTS)]
    out = model.make(context, MoeLayer)(model.tokens, model.ids, model.weights, params, model.lora())
    agree(model, model.step(out), 1e-5)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_Checkpointed_WithAdapters_HasTheSameBits(context, use_reentrant):
    model = Model()
    layer = model.make(context)

    def run(tokens, weights):
        return layer(tokens, model.ids, weights, model.stacks, model.lora())

    plain = model.step(run(model.tokens, model.weights))
    again = model.step(checkpoint(run, model.tokens, model.weights, use_reentrant=use_reentrant))
    assert all(map(torch.equal, plain, again))


def test_CallsWithAndWithoutAdapters_InTurns_AreEachTheirOwn(context):
    model = Model()
    layer, plain = model.make(context), model.make(context, lora_rank=0)
    without, with_them = plain(model.tokens, model.ids, model.weights, model.stacks), model.call(layer)
    assert torch.equal(layer(model.tokens, model.ids, model.weights, model.stacks), without)
    assert torch.equal(model.call(layer), with_them) and not torch.equal(with_them, without)


def test_FewOfTheFactorsTrained_OthersHaveNoGradient(context):
    model = Model()
    layer = model.make(context)
    whole = model.step(model.call(layer))
    for name, factor in model.factors.items():
        factor.grad = None
        factor.requires_grad_(name not in ("a1", "b2"))
    model.call(layer).double().square().sum().backward()
    assert model.factors["a1"].grad is None and model.factors["b2"].grad is None
    for name, want in zip(("b1", "a2"), whole[4:6]):
        assert torch.equal(model.factors[name].grad, want)


def refused(context, text, lora=lambda given: given, trains=False, **options):
    model = Model()
    layer = model.make(context, **options)
    stacks = [stack.requires_grad_(trains) for stack in model.stacks]
    with pytest.raises(InvalidArgument, match=text):
        layer(model.tokens, model.ids, model.weights, stacks, lora(model.lora())).sum().backward()
    good = Model()
    agree(good, good.step(good.call(good.make(context))), 1e-5)


def test_BadAdapters_AreRefusedByName(context):
    def changed(name, factor):
        return lambda lora: lora._replace(factors={**lora.factors, name: factor(lora.factors)})

    refused(context, "give its MoeConfig lora_rank", lora_rank=0)
    refused(context, "la4 is not a factor of an adapter", changed("la4", lambda f: f["la1"]))
    stacked = r"la1 has shape \[3, 3, 24\]: a factor is stacked over the 4"
    refused(context, stacked, changed("la1", lambda f: f["la1"][:3]))
    refused(context, "lb1 has no scale", lambda lora: lora._replace(scales={"lb1": 1.0}))
    refused(context, "grad_params.w1 is given, but with lora_rank 3 the weights are frozen", trains=True)


def test_FactorChangedBeforeItsBackward_IsRefusedByTorch(context):
    model = Model()
    out = model.call(model.make(context))
    with torch.no_grad():
        model.factors["b2"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- codes of 4 and 8 bits ----


@pytest.fixture(params=["ref", "native"])
def gemm(request):
    made = Context(None, ContextOptions(gemm=request.param))
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMS)
def test_Codes_InAStepWithAdapters_HaveTheBitsOfTheDecodedWeights(gemm, kind, dtype):
    model = Model(kind, dtype, bias=True)
    coded, dense = (model.step(model.call(model.make(gemm, is_coded=on), on)) for on in (True, False))
    for number, (got, want) in enumerate(zip(coded, dense)):
        assert want.abs().max() > 0, number
        assert got.dtype is want.dtype and torch.equal(got, want), number


@pytest.mark.parametrize("kind", FORMS)
def test_Codes_CalledQuickly_HaveTheSameBits(gemm, kind):
    model = Model(kind, bias=True)
    layer, params = model.make(gemm, is_coded=True), model.params(True)
    given = model.tokens[:3].detach(), torch.tensor([[0, 1], [2, 3], [1, 3]]), torch.rand(3, TOP_K)
    with torch.no_grad():
        quick = layer.quick(*given, params)
        assert quick is not None and torch.equal(quick, layer(*given, params))
        assert torch.equal(quick, model.make(gemm)(*given, model.params()))


# Bytes of the experts of one layer; docs/finetuning.md has the table.
@pytest.mark.parametrize(
    ("form", "model", "hidden", "experts", "gigabytes"),
    [
        (Format("fp8"), 2048, 768, 128, 0.604),
        (Format("int4"), 2048, 768, 128, 0.311),
        (Format("mxfp4"), 2048, 768, 128, 0.321),
        (Format("mxfp4"), 2880, 2880, 32, 0.423),
    ],
)
def test_Codes_OfRealWidths_HaveTheBytesOfTheTable(form, model, hidden, experts, gigabytes):
    one = 2 * form.bytes_of(hidden, model) + form.bytes_of(model, hidden)
    elements = 3 * model * hidden
    scales = {"fp8": 4 / 128**2, "int4": 2 / 128, "mxfp4": 1 / 32}[form.name]
    assert abs(one / (elements * (form.bits / 8 + scales)) - 1) < 1e-3
    assert round(one * experts / 1e9, 3) == gigabytes
    codes, scales = quantise(torch.zeros(64, 128), form)
    assert codes.nbytes + scales.nbytes == form.bytes_of(64, 128)


def test_Codes_OfNoNumber_RefusedByPlace():
    codes, scales = quantise(torch.ones(2, 3, 64), Format("mxfp4"))
    check_weights(codes, scales, Format("mxfp4"))
    scales[1, 2, 1] = 255
    with pytest.raises(InvalidArgument, match="matrix 1 of the stack: weight: the mxfp4 scale of row 2, columns 32"):
        check_weights(codes, scales, Format("mxfp4"))
    codes, scales = quantise(torch.ones(3, 64), Format("fp8"))
    codes[2, 5] = 0xFF
    with pytest.raises(InvalidArgument, match="weight: the fp8 code of row 2, column 5 is 0xff, NaN"):
        check_weights(codes, scales, Format("fp8"))
    for weight, form, words in (
        (torch.tensor([[0.0, float("nan")]]), "int8", "row 0, column 1 is nan, which int8 cannot represent"),
        (torch.zeros(2, 33), "int4", "a width of 33, but int4"),
        (torch.zeros(2, 32), "int2", "'int2' is not a format"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            quantise(weight, Format(form))


def test_Scales_ThatWantGradients_RefusedByName(context):
    model = Model("int8")
    model.down[1].requires_grad_()
    with pytest.raises(Unsupported, match="a scale of int8 weights requires a gradient"):
        model.call(model.make(context, is_coded=True), True)


# ---- members in one tensor of an expert ----


def unpack(tensors):
    up, down, up_bias, down_bias = tensors
    return (*up.chunk(2), down, *up_bias.chunk(2), down_bias)


def packed(model):
    """Returns the leaves of each expert."""
    return [[each[e].detach().to(model.dtype).requires_grad_() for each in model.params()] for e in range(EXPERTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_Packed_OutputAndGradients_AsSeparate(context, dtype):
    model, found = Model(dtype=dtype, bias=True), []
    for kind in (PackedLayer, MoeLayer):
        leaves = packed(model)
        params = leaves if kind is PackedLayer else [dict(zip(MEMBERS, unpack(tensors))) for tensors in leaves]
        layer = model.make(context, kind, lora_rank=0, unpack=unpack if kind is PackedLayer else None)
        model.tokens.grad = model.weights.grad = None
        out = layer(model.tokens, model.ids, model.weights, params)
        out.float().square().sum().backward()
        found.append([out, model.tokens.grad, model.weights.grad, *[t.grad for tensors in leaves for t in tensors]])
    assert len(found[0]) == 3 + 4 * EXPERTS
    for one, other in zip(*found):
        assert torch.equal(one, other) and one.abs().max() > 0


def test_Packed_SecondBackward_AddsInPlace(context):
    model = Model(bias=True)
    layer, leaves = model.make(context, PackedLayer, lora_rank=0, unpack=unpack), packed(model)
    for count in (1, 2):
        layer(model.tokens, model.ids, model.weights, leaves).sum().backward()
        assert context.passes_in_place == count - 1
        if count == 1:
            once = [tensor.grad.clone() for tensors in leaves for tensor in tensors]
    for first, tensor in zip(once, (tensor for tensors in leaves for tensor in tensors)):
        torch.testing.assert_close(tensor.grad, 2 * first)
