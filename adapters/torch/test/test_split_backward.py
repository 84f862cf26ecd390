# SPDX-License-Identifier: Apache-2.0
"""Tests which weight gradients of linear layers are computed separately, and when.

Their bits are compared by adapters/pipelining/test and by rows of integration_tests/pairs.
"""

import torch
import torch.nn.functional as F
from sluice.adapters.torch.split_backward import SplitBackward, linears_of
from torch import nn

WIDTH = 24


def taken(net, linears, x):
    """Returns a SplitBackward after a first forward, which shows how the net uses its parameters."""
    later = SplitBackward()
    later.take(net, linears)
    later.learn([net(x)])
    later.give_back()
    later.take(net, linears)
    return later


def test_Hooks_OfAParameter_RunWhenItsGradientComes():
    linear, seen = nn.Linear(WIDTH, WIDTH), []
    later = taken(linear, [linear], torch.randn(5, WIDTH))
    linear.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    linear.weight.register_hook(lambda grad: 2 * grad)  # it would fail without a gradient
    x = torch.randn(5, WIDTH)
    with later.left_behind(0):
        linear(x).sum().backward()
    assert not seen
    later.run(0)
    torch.testing.assert_close(seen[0], 2 * x.sum(0).expand(WIDTH, WIDTH))


def test_Backward_OutsideOfAnOp_IsWhole():
    linear = nn.Linear(WIDTH, WIDTH)
    x = torch.randn(5, WIDTH)
    later = taken(linear, [linear], x)
    linear(x).sum().backward()
    later.run(0)
    assert torch.equal(linear.bias.grad, torch.full((WIDTH,), 5.0)) and linear.weight.grad is not None
    assert later.num_left == 0


def test_FirstForwardThatFails_IsNotTheOneThatShows():
    """Calls of a forward that raised would hide a use outside of the layer."""
    linear, later = nn.Linear(WIDTH, WIDTH), SplitBackward()
    later.take(linear, [linear])
    x = torch.randn(5, WIDTH)
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
