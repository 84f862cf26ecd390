# SPDX-License-Identifier: Apache-2.0
"""Tests that experts whose members are parts of a tensor have the bits of a layer with separate tensors."""

import pytest
import torch
from sluice.adapters.torch import MoeConfig, MoeLayer, PackedLayer
from sluice.errors import InvalidArgument

EXPERTS, MODEL, HIDDEN, TOP_K = 3, 16, 12, 2
CONFIG = {
    "model_width": MODEL,
    "hidden_width": HIDDEN,
    "num_experts": EXPERTS,
    "top_k": TOP_K,
    "activation": "silu",
    "gated": True,
    "bias": True,
}


def unpack(tensors):
    up, down, up_bias, down_bias = tensors
    return (*up.chunk(2), down, *up_bias.chunk(2), down_bias)


def packed(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = ((2 * HIDDEN, MODEL), (MODEL, HIDDEN), (2 * HIDDEN,), (MODEL,))
    return [
        [(torch.randn(shape, generator=generator) * 0.3).to(dtype).requires_grad_() for shape in shapes]
        for _ in range(EXPERTS)
    ]


def inputs(dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randn(20, MODEL, generator=generator).to(dtype).requires_grad_()
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(20)]).int()
    return tokens, ids, torch.rand(20, TOP_K, generator=generator).requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_Packed_OutputAndGradients_AsSeparate(context, dtype):
    together, separate = packed(dtype), packed(dtype)
    split = [dict(zip(("w1", "w3", "w2", "b1", "b3", "b2"), unpack(tensors))) for tensors in separate]
    outputs, grads = [], []
    for layer, params, leaves in (
        (PackedLayer(context, MoeConfig(dtype=dtype, **CONFIG), unpack=unpack), together, together),
        (MoeLayer(context, MoeConfig(dtype=dtype, **CONFIG)), split, separate),
    ):
        tokens, ids, weights = inputs(dtype)
        out = layer(tokens, ids, weights, params)
        out.float().square().sum().backward()
        outputs.append(out)
        grads.append([tokens.grad, weights.grad, *[tensor.grad for tensors in leaves for tensor in tensors]])
    assert torch.equal(*outputs)
    assert len(grads[0]) == 2 + 4 * EXPERTS
    for one, other in zip(*grads):
        assert torch.equal(one, other) and one.abs().max() > 0


def test_Packed_SecondBackward_AddsInPlace(context):
    layer, params = PackedLayer(context, MoeConfig(**CONFIG), unpack=unpack), packed()
    for count in (1, 2):
        tokens, ids, weights = inputs()
        layer(tokens, ids, weights, params).sum().backward()
        assert context.passes_in_place == count - 1
        if count == 1:
            once = [tensor.grad.clone() for tensors in params for tensor in tensors]
    for first, tensor in zip(once, (tensor for tensors in params for tensor in tensors)):
        torch.testing.assert_close(tensor.grad, 2 * first)


def test_Packed_OtherNumberOfExperts_IsRefused(context):
    layer = PackedLayer(context, MoeConfig(**CONFIG), unpack=unpack)
    with pytest.raises(InvalidArgument, match="2 parameter sets for 3 local experts"):
        layer(*inputs(), packed()[:2])
