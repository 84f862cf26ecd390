# SPDX-License-Identifier: Apache-2.0
"""Jobs of ranks: backwards that add to existing gradients, in layers with separate parameters per expert."""

import torch
from layer_cases import Case, close, group, world
from sluice.adapters.torch import Context
from torch.nn.parallel import DistributedDataParallel

CASES = {
    "plain": {},
    "gated bias chunks": dict(gated=True, bias=True, n=3, wgrad="per_chunk"),
    "transposed": dict(strides="transposed", n=2),
    "idle expert": dict(idle=(0,), hot=1),
    "nothing on one rank": dict(tokens=(11, 0)),
    "deduplicated": dict(deduplicate=True, per_rank=3, K=3),
    "bf16": dict(dtype=torch.bfloat16, n=2),
}


def micro_steps():
    """Three backwards over the same rows give three times the gradient; the last two are added in place."""
    W, rank = world()
    context = Context(group())
    for seed, (name, options) in enumerate(CASES.items()):
        case = Case(W, **{"tokens": (16, 9), "seed": 60 + seed, **options})
        before, layer = context.passes_in_place, case.layer(context)
        case.check(layer, rank, passes=3)
        assert context.passes_in_place - before == 2, (name, context.passes_in_place)
        layer.close()
    assert context.stats()["passes_in_place"] == 2 * len(CASES)

    # Padded parameters get gradients with other strides, without gaps, so autograd adds.
    case = Case(W, strides="padded", seed=70)
    case.check(case.layer(context, accumulate="in_place"), rank, passes=2)
    assert context.passes_in_place == 2 * len(CASES)
    return True


class _Experts(torch.nn.Module):
    def __init__(self, case, layer):
        super().__init__()
        self.layer = layer
        names = case.params[0]
        self.experts = torch.nn.ModuleList(
            torch.nn.ParameterDict({name: torch.nn.Parameter(p[name].clone()) for name in names}) for p in case.params
        )

    def forward(self, tokens, ids, weights):
        return self.layer(tokens, ids, weights, [dict(expert.items()) for expert in self.experts])


def data_parallel():
    """Returns gradients after steps without and with reduction under DDP, whose hooks reduce added gradients."""
    W, rank = world()
    context = Context()  # every rank has all experts
    case = Case(1, per_rank=3, tokens=(16,), seed=80)
    module = _Experts(case, case.layer(context))
    wrapped = DistributedDataParallel(module)
    tokens, ids, weights, _ = case.inputs(0)
    cotangent = case.cotangents[0]
    with wrapped.no_sync():
        wrapped(tokens, ids, weights).backward(cotangent)
    wrapped(tokens, ids, weights * (1 + rank)).backward(cotangent)
    assert context.passes_in_place == 0
    once = case.expected(0)[3]
    scaled = sum(2 + other for other in range(W)) / W  # route weights scale the gradients of parameters
    for index, expert in enumerate(module.experts):
        for name, parameter in expert.items():
            close(f"expert {index} {name}", parameter.grad, scaled * once[index][name], 8 * case.tolerance())
    module.layer.close()
    return True
