# SPDX-License-Identifier: Apache-2.0
"""Tests that a layer with packed stacks has the bits of one with decoded weights, and holds only codes and scales."""

import pytest
import torch
from sluice.adapters.torch import (
    Context,
    ContextOptions,
    Format,
    Lora,
    MoeConfig,
    StackedLayer,
    check_weights,
    dequantise,
    quantise,
)
from sluice.errors import InvalidArgument, Unsupported

EXPERTS, TOP_K, RANK, TOKENS = 4, 2, 3, 40
# Widths as odd as each format lets them be.
FORMS = {"mxfp4": (Format("mxfp4"), 64, 96), "fp8": (Format("fp8"), 161, 137)}
FORMS |= {"int8": (Format("int8"), 75, 45), "int4": (Format("int4", 32), 70, 34)}


@pytest.fixture(params=["ref", "native"])
def context(request):
    made = Context(None, ContextOptions(gemm=request.param))
    yield made
    made.close()


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + shape[-1])) * 0.3


def halves(tensor):
    return (None, None) if tensor is None else tensor.chunk(2, 1)


class Model:
    """Gate above up in one stack, down, biases; as codes and scales, and decoded."""

    def __init__(self, kind, dtype):
        self.form, self.model, self.hidden = FORMS[kind]
        gate, up = (quantise(normal(EXPERTS, self.hidden, self.model) + n, self.form) for n in range(2))
        # Blocks of rows restart at up, as in a checkpoint with separate gate and up.
        self.up = [torch.cat(pair, 1) for pair in zip(gate, up)]
        self.down = quantise(normal(EXPERTS, self.model, self.hidden), self.form)
        decoded = [torch.cat([dequantise(*half, self.form, dtype) for half in (gate, up)], 1)]
        self.decoded = [*decoded, dequantise(*self.down, self.form, dtype)]
        self.biases = [normal(EXPERTS, 2 * self.hidden), normal(EXPERTS, self.model) * 0.7]
        self.dtype = dtype

    def layer(self, context, is_packed):
        config = MoeConfig(
            model_width=self.model, hidden_width=self.hidden, num_experts=EXPERTS, top_k=TOP_K, activation="silu",
            gated=True, bias=True, lora_rank=RANK, dtype=self.dtype,
            weight_format=self.form.name if is_packed else "plain", weight_block=self.form.block if is_packed else 0,
        )  # fmt: skip

        def views(tensors):
            up, down, up_bias, down_bias, *scales = tensors
            found = [*halves(up), down, *halves(up_bias), down_bias]
            return [*found, *halves(scales[0]), scales[1]] if is_packed else found

        return StackedLayer(context, config, views=views, num_scales=2 if is_packed else 0)

    def step(self, context, is_packed):
        """Returns the output, and gradients of tokens, route weights, biases and adapters."""
        generator = torch.Generator().manual_seed(7)

        def given(*shape, dtype=torch.float32):
            return (torch.randn(shape, generator=generator) * 0.2).to(dtype).requires_grad_()

        tokens = given(TOKENS, self.model, dtype=self.dtype)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(TOKENS)])
        weights = torch.rand(TOKENS, TOP_K, generator=generator).requires_grad_()
        shapes = {"la1": (RANK, self.model), "lb1": (self.hidden, RANK), "lb3": (self.hidden, RANK)}
        shapes |= {"la2": (RANK, self.hidden), "lb2": (self.model, RANK)}
        factors = {name: given(EXPERTS, *shape) for name, shape in shapes.items()}
        biases = [bias.clone().requires_grad_() for bias in self.biases]
        if is_packed:
            params = [self.up[0], self.down[0], *biases, self.up[1], self.down[1]]
        else:
            params = [*self.decoded, *biases]
        layer = self.layer(context, is_packed)
        out = layer(tokens, ids, weights, params, Lora(factors, {"la1": 2.0}))
        out.float().square().sum().backward()
        return [out.detach(), *(each.grad for each in (tokens, weights, *biases, *factors.values()))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMS)
def test_PackedStacks_InAStepWithAdapters_HaveTheBitsOfTheDecodedWeights(context, kind, dtype):
    model = Model(kind, dtype)
    packed, dense = model.step(context, True), model.step(context, False)
    for number, (got, want) in enumerate(zip(packed, dense)):
        assert want.abs().max() > 0, number
        assert got.dtype is want.dtype and torch.equal(got, want), number


@pytest.mark.parametrize("kind", FORMS)
def test_PackedStacks_CalledQuickly_HaveTheSameBits(context, kind):
    model = Model(kind, torch.float32)
    layer, biases = model.layer(context, True), model.biases
    tokens, ids = normal(3, model.model), torch.tensor([[0, 1], [2, 3], [1, 3]])
    weights, params = torch.rand(3, TOP_K), [model.up[0], model.down[0], *biases, model.up[1], model.down[1]]
    with torch.no_grad():
        quick = layer.quick(tokens, ids, weights, params)
        assert quick is not None and torch.equal(quick, layer(tokens, ids, weights, params))
        assert torch.equal(quick, model.layer(context, False)(tokens, ids, weights, [*model.decoded, *biases]))


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
def test_PackedStacks_OfRealWidths_HaveTheBytesOfTheTable(form, model, hidden, experts, gigabytes):
    one = 2 * form.bytes_of(hidden, model) + form.bytes_of(model, hidden)
    elements = 3 * model * hidden
    scales = {"fp8": 4 / 128**2, "int4": 2 / 128, "mxfp4": 1 / 32}[form.name]
    assert abs(one / (elements * (form.bits / 8 + scales)) - 1) < 1e-3
    assert round(one * experts / 1e9, 3) == gigabytes
    codes, scales = quantise(torch.zeros(64, 128), form)
    assert codes.nbytes + scales.nbytes == form.bytes_of(64, 128)


def test_Weights_WithCodesOfNoNumber_RefusedByPlace():
    codes, scales = quantise(normal(2, 3, 64), Format("mxfp4"))
    check_weights(codes, scales, Format("mxfp4"))
    scales[1, 2, 1] = 255
    with pytest.raises(InvalidArgument, match="matrix 1 of the stack: weight: the mxfp4 scale of row 2, columns 32"):
        check_weights(codes, scales, Format("mxfp4"))
    codes, scales = quantise(normal(3, 64), Format("fp8"))
    codes[2, 5] = 0xFF
    with pytest.raises(InvalidArgument, match="weight: the fp8 code of row 2, column 5 is 0xff, NaN"):
        check_weights(codes, scales, Format("fp8"))
    with pytest.raises(InvalidArgument, match="row 0, column 1 is nan, which int8 cannot represent"):
        quantise(torch.tensor([[0.0, float("nan")]]), Format("int8"))
    with pytest.raises(InvalidArgument, match="a width of 33, but int4"):
        quantise(torch.zeros(2, 33), Format("int4"))
    with pytest.raises(InvalidArgument, match="'int2' is not a format"):
        quantise(torch.zeros(2, 32), Format("int2"))


def test_Scales_ThatWantGradients_RefusedByName(context):
    model = Model("int8", torch.float32)
    model.down[1].requires_grad_()
    with pytest.raises(Unsupported, match="a scale of int8 weights requires a gradient"):
        model.step(context, True)
