# SPDX-License-Identifier: Apache-2.0
"""Tests that separate weight gradients of linear layers have the bits of a whole backward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sluice.adapters.torch.split_backward import SplitBackward, linears_of
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 24
MICRO_BATCHES = 3


class Net(nn.Module):
    """A layer that is used twice, a frozen one, one without bias, and a norm whose gradients are never deferred."""

    def __init__(self, checkpointed):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH, bias=False)
        self.twice, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.half_frozen = nn.Linear(WIDTH, WIDTH)
        self.half_frozen.bias.requires_grad_(False)
        self.checkpointed = checkpointed

    def inner(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x):
        x = self.twice(torch.tanh(self.twice(x)))
        if self.checkpointed is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.checkpointed == "reentrant")
        return self.half_frozen(self.frozen(x))


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def inputs(shape, dtype):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, WIDTH, generator=generator).to(dtype) for _ in range(MICRO_BATCHES)]


def never(module):
    return False


def taken(net, linears, x):
    """Returns a SplitBackward after a first forward, which shows how the net uses its parameters."""
    later = SplitBackward()
    later.take(net, linears)
    later.learn([net(x)])
    later.give_back()
    later.take(net, linears)
    return later


@pytest.mark.parametrize("checkpointed", [None, "reentrant", "nonreentrant"])
@pytest.mark.parametrize("shape", [(7,), (1,), (2, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_Gradients_ThatCameLater_HaveTheBitsOfAWholeBackward(checkpointed, shape, dtype):
    torch.manual_seed(1)
    whole = Net(checkpointed).to(dtype)
    divided = copy.deepcopy(whole)
    later = taken(divided, linears_of(divided, never), inputs(shape, dtype)[0].requires_grad_())
    waiting = []
    for number, x in enumerate(inputs(shape, dtype)):
        given = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [net(each) for net, each in zip((whole, divided), given)]
        assert bits(outputs[0]) == bits(outputs[1])
        grad = torch.cos(outputs[0].detach())
        outputs[0].backward(grad)
        with later.left_behind(number):
            outputs[1].backward(grad)
        assert bits(given[0].grad) == bits(given[1].grad)
        waiting.append(number)
        if number == 0:
            assert divided.up.weight.grad is None and divided.norm.weight.grad is not None
        if len(waiting) == 2:  # one later
            later.run(waiting.pop(0))
    later.run(waiting.pop(0))
    later.give_back()
    assert later.num_left == 4 * MICRO_BATCHES
    for (name, one), (_, other) in zip(whole.named_parameters(), divided.named_parameters()):
        assert (one.grad is None) == (other.grad is None) == (not one.requires_grad), name
        if one.grad is not None:
            assert bits(one.grad) == bits(other.grad), name
    assert "forward" not in vars(divided.up)


def test_Gradients_OfTwoWalksOverOneGraph_AreAddedOneAfterTheOther():
    """Runs two backwards, like a stage that passes on several tensors."""
    torch.manual_seed(2)
    whole = nn.Linear(WIDTH, WIDTH)
    x, other, third = inputs((5,), torch.float32)
    divided = copy.deepcopy(whole)
    later = taken(divided, [divided], x)
    for net in (whole, divided):
        out = net(x)
        with later.left_behind(0):
            out.backward(other, retain_graph=True)
            out.backward(third)
    later.run(0)
    assert bits(whole.weight.grad) == bits(divided.weight.grad) and bits(whole.bias.grad) == bits(divided.bias.grad)
    assert later.num_left == 2


def test_Hooks_OfAParameter_RunWhenItsGradientComes():
    linear, seen = nn.Linear(WIDTH, WIDTH), []
    later = taken(linear, [linear], inputs((5,), torch.float32)[0])
    linear.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    linear.weight.register_hook(lambda grad: 2 * grad)  # it would fail without a gradient
    x, *_ = inputs((5,), torch.float32)
    with later.left_behind(0):
        linear(x).sum().backward()
    assert not seen
    later.run(0)
    torch.testing.assert_close(seen[0], 2 * x.sum(0).expand(WIDTH, WIDTH))


def test_Backward_OutsideOfAnOp_IsWhole():
    linear = nn.Linear(WIDTH, WIDTH)
    x, *_ = inputs((5,), torch.float32)
    later = taken(linear, [linear], x)
    linear(x).sum().backward()
    later.run(0)
    assert torch.equal(linear.bias.grad, torch.full((WIDTH,), 5.0)) and linear.weight.grad is not None
    assert later.num_left == 0


def test_FirstForwardThatFails_IsNotTheOneThatShows():
    """Calls of a forward that raised would hide a use outside of the layer."""
    linear, later = nn.Linear(WIDTH, WIDTH), SplitBackward()
    later.take(linear, [linear])
    x, *_ = inputs((5,), torch.float32)
    linear(x)
    later.give_back()
    later.take(linear, [linear])
    later.learn([linear(x) + linear.bias])
    with later.left_behind(0):
        (linear(x) + linear.bias).sum().backward()
    later.run(0)
    assert later.num_left == 0 and torch.equal(linear.bias.grad, torch.full((WIDTH,), 10.0))


class _OwnForward(nn.Linear):
    def forward(self, x):
        return F.linear(x, 2 * self.weight, self.bias)


def test_LinearsOf_AModel_AreThoseThatNothingElseUses():
    shared = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    net = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("plain", "one", "other", "hidden", "patched")})
    net["own"] = _OwnForward(WIDTH, WIDTH)
    net["one"].weight = net["other"].weight = shared
    net["hidden"] = nn.Sequential(net["hidden"])
    net["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    net["compiled"] = nn.Linear(WIDTH, WIDTH)
    net["compiled"]._compiled_call_impl = net["compiled"].forward  # as its compile() leaves it
    net["patched"].forward = net["patched"].forward
    assert linears_of(net, lambda each: isinstance(each, nn.Sequential)) == [net["plain"]]
