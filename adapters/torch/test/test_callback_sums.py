# SPDX-License-Identifier: Apache-2.0
"""Tests that 16-bit parameter gradients of callback experts are summed over chunks in f32 and rounded once."""

import pytest
import sluice  # noqa: F401  (finds the library)
import torch
from sluice.adapters.torch import CallbackExperts, Context, MoeConfig, MoeLayer

CHUNKS, TOKENS, WIDTH = 32, 128, 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_CallbackGradients_ManyChunks_AreTheF32SumsRoundedOnce(dtype: torch.dtype) -> None:
    """Compares with the same chunks summed by hand. A running sum in 16 bits would differ."""
    torch.manual_seed(0)
    module = torch.nn.Linear(WIDTH, WIDTH).to(dtype)
    tokens, grad = torch.randn(2, TOKENS, WIDTH).to(dtype)
    layer = MoeLayer(
        Context(),
        MoeConfig(model_width=WIDTH, num_experts=1, top_k=1, dtype=dtype, chunks=CHUNKS),
        experts=CallbackExperts([module]),
    )
    ids, weights = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1)
    layer(tokens, ids, weights).backward(grad)
    parameters = list(module.parameters())
    parts = [
        torch.autograd.grad(module(rows), parameters, dy) for rows, dy in zip(tokens.chunk(CHUNKS), grad.chunk(CHUNKS))
    ]
    for parameter, gradients in zip(parameters, zip(*parts)):
        wide, running = gradients[0].float(), gradients[0]
        for part in gradients[1:]:
            wide, running = wide + part, running + part
        assert torch.equal(parameter.grad, wide.to(dtype))
        assert not torch.equal(running, wide.to(dtype)), "this case would not notice a sum in 16 bits"
