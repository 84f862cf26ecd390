# SPDX-License-Identifier: Apache-2.0
"""Trains a few steps over a process group, in a Python with torch and an unpacked wheel, without a compiler."""

import os
import sys

import sluice
import torch
import torch.distributed as dist
from sluice.adapters.torch import Context, ContextOptions, EpGroup, MoeConfig, MoeLayer, build

T, M, H, E = 16, 8, 12, 2

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.manual_seed(0)
context = Context(EpGroup.for_ranks([0]), ContextOptions())
layer = MoeLayer(
    context, MoeConfig(model_width=M, hidden_width=H, num_experts=E, top_k=1, activation="relu", gated=False)
)
x, target = torch.randn(T, M), torch.randn(T, M)
ids, weights = torch.arange(T, dtype=torch.int32).reshape(T, 1) % E, torch.ones(T, 1)
params = [{"w1": torch.randn(H, M, requires_grad=True), "w2": torch.randn(M, H, requires_grad=True)} for _ in range(E)]
every = [tensor for expert in params for tensor in expert.values()]


def stock(e):
    rows = x[ids[:, 0] == e]
    return torch.relu(rows @ params[e]["w1"].T) @ params[e]["w2"].T


losses = []
for step in range(3):
    y = layer(x, ids, weights, params)
    if step == 0:
        wanted = torch.autograd.grad(sum(((stock(e) - target[ids[:, 0] == e]) ** 2).sum() for e in range(E)), every)
    loss = ((y - target) ** 2).sum()
    gradients = torch.autograd.grad(loss, every)
    if step == 0:
        for found, right in zip(gradients, wanted):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    losses.append(loss.item())
    with torch.no_grad():
        for tensor, gradient in zip(every, gradients):
            tensor -= 1e-3 * gradient
assert losses[2] < losses[1] < losses[0], losses
assert build.compiler() is None, build.compiler()
found, _ = build.find()
assert found == build.shipped_path(), found
dist.destroy_process_group()
print("{}.{}".format(*sys.version_info), torch.__version__, os.path.basename(found), sluice.__version__)
