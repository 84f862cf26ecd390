# SPDX-License-Identifier: Apache-2.0
"""Controls routing through DeepSpeed's own gate.

The weight of TopKGate is set to the first E rows of the identity, so that the first E numbers of a token *are* its
logits. A token's logits are large for its chosen experts, in decreasing order, and small for the others. Softmax,
choice, capacity, dropping (with its random draws) and route weights remain the host's, and both sides of a comparison
run them on the same tokens.
"""

import torch
from torch import nn


def assignments(T: int, E: int, K: int, skew: float, seed: int) -> torch.Tensor:
    """[T, K] distinct experts per token. Expert 0 gets min(T, skew * T * K / E) routes, the others equal numbers."""
    generator = torch.Generator().manual_seed(seed)
    hot = min(T, round(skew * T * K / E)) if skew != 1.0 else -1
    chosen = torch.empty(T, K, dtype=torch.int64)
    at = 0  # position in the endless sequence 0 1 ... others-1 0 1 ..., of which any K <= others are distinct
    others = E if hot < 0 else E - 1
    for token in range(T):
        is_hot = token < hot
        count = K - is_hot
        rest = [(at + j) % others + (hot >= 0) for j in range(count)]
        at += count
        chosen[token] = torch.tensor([0, *rest] if is_hot else rest)
    return chosen[torch.randperm(T, generator=generator)]


def tokens(chosen: torch.Tensor, E: int, M: int, seed: int) -> torch.Tensor:
    """[T, M] tokens whose first E numbers are logits that make the gate choose `chosen`."""
    if E > M:
        raise ValueError(f"the routing needs E <= M, got E = {E}, M = {M}")
    T, K = chosen.shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, M, generator=generator)
    wanted = 8.0 - 0.5 * torch.arange(K, dtype=torch.float32).expand(T, K)
    # Add a little noise, because dropping by probability needs an order among the tokens of an expert.
    wanted = wanted + 0.1 * torch.rand(T, K, generator=generator)
    x[:, :E] = 0.3 * x[:, :E]
    x[:, :E].scatter_(1, chosen, wanted)
    return x


def control_gate(gate: nn.Module) -> None:
    """Make the first E numbers of a token its logits."""
    weight = gate.get_submodule("wg").get_parameter("weight")
    with torch.no_grad():
        weight.zero_()
        weight[:, : weight.shape[0]] = torch.eye(weight.shape[0])


def kept_rows(gate: nn.Module, x: torch.Tensor, seed: int) -> tuple[torch.Tensor, int]:
    """Rows per expert that are not dropped, and the padded rows per expert (the capacity), from the gate."""
    torch.manual_seed(seed)
    with torch.no_grad():
        _aux, capacity, experts, indices, *_ = gate(x, None, True)
    kept = indices[indices >= 0].long()
    return torch.bincount(kept, minlength=int(experts)), int(capacity)
