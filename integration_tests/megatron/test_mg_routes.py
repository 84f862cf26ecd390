# SPDX-License-Identifier: Apache-2.0
"""Tests the conversion of the router's tensors to ids and weights, without Megatron."""

import pytest
import torch
from sluice.adapters.megatron import routes


def test_Routes_FewerThanTopK_AreMarkedAndAscend() -> None:
    chosen = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)
    probs = torch.tensor([[0.2, 0.0, 0.8, 0.0], [0.0, 0.0, 0.0, 0.5], [0.0, 0.0, 0.0, 0.0]])
    found = routes.of_map(probs, chosen, 2)
    assert found.expert_ids.tolist() == [[0, 2], [3, -1], [-1, -1]]
    assert torch.equal(found.weights, torch.tensor([[0.2, 0.8], [0.5, 0.0], [0.0, 0.0]]))
    assert found.expert_ids.dtype == torch.int32 and found.weights.dtype == torch.float32


def test_Routes_ChosenWithProbabilityZero_StayWithTheirGradient() -> None:
    probs = torch.tensor([[0.0, 1.0, 0.0]], requires_grad=True)
    found = routes.of_map(probs, torch.tensor([[True, True, False]]), 2)
    assert found.expert_ids.tolist() == [[0, 1]]
    (found.weights * torch.tensor([[3.0, 5.0]])).sum().backward()
    assert probs.grad.tolist() == [[3.0, 5.0, 0.0]]


def test_Routes_Padded_KeepThoseThatWereChosen() -> None:
    """Every expert is full, so a token has more than K routes."""
    probs = torch.tensor([[0.0, 0.7, 0.3, 0.0]], requires_grad=True)
    found = routes.of_map(probs, torch.ones(1, 4, dtype=torch.bool), 2, padded=True)
    assert found.expert_ids.tolist() == [[1, 2]]
    found.weights.sum().backward()
    assert probs.grad.tolist() == [[0.0, 1.0, 1.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_Routes_OtherRouterDtypes_GradientComesBackInThem(dtype: torch.dtype) -> None:
    probs = torch.rand(5, 8, dtype=dtype, requires_grad=True)
    chosen = torch.zeros(5, 8, dtype=torch.bool).scatter(1, probs.detach().topk(3).indices, True)
    found = routes.of_map(probs, chosen, 3)
    found.weights.sum().backward()
    assert probs.grad.dtype == dtype and torch.equal(probs.grad != 0, chosen)
