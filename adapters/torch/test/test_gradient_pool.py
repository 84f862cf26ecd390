# SPDX-License-Identifier: Apache-2.0
"""Tests that gradients reuse the memory of freed gradients: same bits, within the limit, off on request."""

import pytest
import sluice
import torch
from sluice.adapters.torch import Context, ContextOptions, MoeConfig, StackedLayer
from sluice.adapters.torch.gradient_pool import (
    LEAST_BYTES,
    default_limit,
    empty_gradient,
    give_back,
    numbers,
    pool_stats,
)

EXPERTS, MODEL, HIDDEN, TOP_K = 4, 256, 384, 2  # gradients of 3 and 1.5 MiB
UP, DOWN = 4 * EXPERTS * 2 * HIDDEN * MODEL, 4 * EXPERTS * MODEL * HIDDEN
BOTH = UP + DOWN


def views(tensors):
    up, down = tensors
    halves = (None, None) if up is None else up.chunk(2, 1)
    return (*halves, down)


def make(context, **options):
    return StackedLayer(
        context,
        MoeConfig(
            model_width=MODEL,
            hidden_width=HIDDEN,
            num_experts=EXPERTS,
            top_k=TOP_K,
            activation="silu",
            gated=True,
            **options,
        ),
        views=views,
    )


class Model:
    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        shapes = ((EXPERTS, 2 * HIDDEN, MODEL), (EXPERTS, MODEL, HIDDEN))
        self.params = [(torch.randn(shape, generator=generator) * 0.1).requires_grad_() for shape in shapes]

    def step(self, layer, seed):
        """Returns the gradients of one step that starts without gradients."""
        for param in self.params:
            param.grad = None
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randn(32, MODEL, generator=generator).requires_grad_()
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(32)])
        weights = torch.rand(32, TOP_K, generator=generator).requires_grad_()
        layer(tokens, ids, weights, self.params).square().sum().backward()
        return [param.grad for param in self.params]


@pytest.fixture
def context():
    give_back()
    made = Context(None, ContextOptions(gemm="native"))
    yield made
    made.close()


def grew(before):
    """Returns the numbers of (new, reused) gradients since `before`."""
    now = pool_stats()
    return now.num_fresh - before.num_fresh, now.num_reused - before.num_reused


def test_Gradients_LetGoOf_ServeTheNextStepWithTheSameBits(context):
    model, other = Model(), Model()
    layer, plain = make(context), make(context, gradient_pool=0)
    before, reused, places = pool_stats(), numbers()["gradients_reused"], []
    for seed in range(4):
        for mine, theirs in zip(model.step(layer, seed), other.step(plain, seed)):
            assert torch.equal(mine, theirs), seed
            places.append(mine.data_ptr())
        del mine, theirs  # these would keep their memory
    assert places == places[:2] * 4  # each parameter has them without a copy
    assert grew(before) == (2, 6) and numbers()["gradients_reused"] - reused == 6
    assert pool_stats().out_bytes - before.out_bytes == BOTH


def test_Gradient_StillReferredTo_KeepsItsMemory(context):
    model, layer = Model(), make(context)
    kept = model.step(layer, 1)
    copies = [grad.clone() for grad in kept]
    before = pool_stats()
    model.step(layer, 2)
    assert grew(before) == (2, 0)
    assert all(map(torch.equal, kept, copies))
    view = kept[0][1]  # a view keeps all of it as well
    del kept
    assert pool_stats().idle_bytes == DOWN
    model.step(layer, 3)
    assert torch.equal(view, copies[0][1])


def test_GiveBack_FreesWhatLiesIdleAndNothingElse(context):
    model, layer = Model(), make(context)
    model.step(layer, 1)
    model.params[1].grad = None
    before = model.params[0].grad.clone()
    assert numbers()["gradient_pool_bytes"] == sluice.give_back() == DOWN
    assert pool_stats().idle_bytes == 0 and sluice.give_back() == 0
    assert torch.equal(model.params[0].grad, before)


def test_Pool_BeyondItsLimit_FreesTheOldest(context):
    model, layer = Model(), make(context, gradient_pool=UP)
    model.step(layer, 1)
    model.params[1].grad = None
    assert pool_stats().idle_bytes == DOWN
    model.params[0].grad = None
    assert pool_stats().idle_bytes == UP  # the newer one alone


def test_Pool_Off_TakesNothing(context):
    model, layer = Model(), make(context, gradient_pool=0)
    before = pool_stats()
    model.step(layer, 1)
    model.step(layer, 2)
    assert pool_stats() == before


def test_Pool_UnderABudget_IsOffUnlessAskedFor():
    with_budget = Context(None, ContextOptions(gemm="native", memory_budget=1 << 30))
    assert make(with_budget).gradient_pool == 0
    assert make(with_budget, gradient_pool=UP).gradient_pool == UP
    with_budget.close()


def test_Pool_OfWhatIsNoLongerTrained_EmptiesWhileOthersAre(context):
    old = [empty_gradient(torch.empty(LEAST_BYTES), default_limit()) for _ in range(3)]
    assert pool_stats().out_bytes >= 3 * old[0].nbytes
    del old
    model, layer = Model(), make(context)
    for seed in range(12):
        model.step(layer, seed)
    assert pool_stats().idle_bytes == 0


def test_LastContext_Closed_GivesAllBack():
    made = Context(None, ContextOptions(gemm="native"))
    model = Model()
    model.step(make(made), 1)
    model.params[0].grad = model.params[1].grad = None
    assert pool_stats().idle_bytes >= BOTH
    for context in list(sluice.adapters.torch.context.all_alive()):
        context.close()
    assert pool_stats().idle_bytes == 0


@pytest.mark.parametrize(
    "like",
    [
        torch.empty(512, 1024).t(),
        torch.empty(1, 1024, 512, dtype=torch.bfloat16).permute(2, 0, 1),
        torch.empty(600, 600)[:512, :512],  # with gaps: torch's own
        torch.empty(4),  # small: torch's own
    ],
    ids=["transposed", "permuted", "gaps", "small"],
)
def test_EmptyGradient_IsLikeEmptyLike(like):
    made, wanted = empty_gradient(like, 1 << 30), torch.empty_like(like)
    assert (made.shape, made.stride(), made.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)
    made.fill_(3)
    made.resize_(7, 1 << 18)  # a storage that torch may grow
    assert made.numel() == 7 << 18
