# SPDX-License-Identifier: Apache-2.0
"""Tests which experts are fused, and which properties prevent that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sluice.adapters.deepspeed.moe.experts import fused_form, still_exact, unsupported_reason
from torch import nn

M, H = 4, 6


class Plain(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down, self.act = nn.Linear(M, H, bias), nn.Linear(H, M, bias), nn.GELU()

    def forward(self, x):
        """A docstring is no statement."""
        return self.down(self.act(self.up(x)))


class Named(Plain):
    def forward(self, hidden):
        hidden = self.up(hidden)
        hidden = torch.relu(hidden)
        return self.down(hidden)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(M, H, False), nn.Linear(H, M, False), nn.Linear(M, H, False)

    def forward(self, x):
        up = self.w3(x)
        return self.w2(up * F.silu(self.w1(x)))


def sequential(*middle: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(M, H), *middle, nn.Linear(H, M))


@pytest.mark.parametrize(
    "make, activation, gated, bias",
    [
        (lambda: sequential(nn.ReLU()), "relu", False, True),
        (lambda: sequential(nn.GELU("tanh")), "gelu_tanh", False, True),
        (lambda: sequential(nn.SiLU(), nn.Identity(), nn.Dropout(0.0)), "silu", False, True),
        (lambda: sequential(), "identity", False, True),
        (Plain, "gelu", False, True),
        (lambda: Plain(bias=False), "gelu", False, False),
        (Named, "relu", False, True),
        (Gated, "silu", True, False),
    ],
)
def test_Expert_KnownForm_IsFused(make: Any, activation: str, gated: bool, bias: bool) -> None:
    form = fused_form([make(), make()])
    assert not isinstance(form, str), form
    assert (form.activation, form.gated, form.bias) == (activation, gated, bias)
    assert (form.model_width, form.hidden_width) == (M, H)


class Branch(Plain):
    def forward(self, x):
        if self.training:
            return self.down(self.act(self.up(x)))
        return x


class Scaled(Plain):
    scale = 2.0

    def forward(self, x):
        return self.down(self.act(self.up(x)) * self.scale)


class Printing(Plain):
    def forward(self, x):
        _ = print("here")
        return self.down(self.act(self.up(x)))


class Storing(Plain):
    def forward(self, x):
        self.seen = x
        return self.down(self.act(self.up(x)))


def helper(x):
    return F.relu(x)


class Helped(Plain):
    def forward(self, x):
        return self.down(helper(self.up(x)))


class Extended(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(M, M)


class Residual(Plain):
    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class TwoInputs(Plain):
    def forward(self, x, y=None):
        return self.down(self.act(self.up(x)))


class OwnCall(Plain):
    def __call__(self, x):
        return super().__call__(x)


class Decorated(Plain):
    @torch.no_grad()
    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Lora(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


class HalfBias(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(H, M, bias=False)


class Twice(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = nn.Linear(M, M)


TOUCHES: dict[str, Callable[[Any], Any]] = {
    "forward hook": lambda expert: expert.up.register_forward_hook(lambda *_: None),
    "pre hook": lambda expert: expert.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda expert: expert.down.register_full_backward_hook(lambda *_: None),
    "parametrization": lambda expert: torch.nn.utils.parametrizations.weight_norm(expert.up),
    "instance forward": lambda expert: setattr(expert, "forward", lambda x: x),
    "lora": lambda expert: setattr(expert, "up", Lora(M, H)),
    "activation hook": lambda expert: expert.act.register_forward_hook(lambda *_: None),
}


def touched(what: str) -> nn.Module:
    expert = Plain()
    TOUCHES[what](expert)
    return expert


@pytest.mark.parametrize(
    "make",
    [
        *(lambda what=what: touched(what) for what in TOUCHES),
        Branch,
        Scaled,
        Printing,
        Storing,
        Helped,
        Extended,
        Residual,
        TwoInputs,
        OwnCall,
        Decorated,
        HalfBias,
        Twice,
        lambda: nn.Linear(M, M),
        lambda: sequential(nn.ReLU(), nn.ReLU()),
        lambda: sequential(nn.LeakyReLU()),
        lambda: sequential(nn.Dropout(0.1)),
        lambda: nn.Sequential(nn.Linear(M, H), nn.ReLU(), nn.Linear(H, M + 1)),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(M, H), nn.Linear(H, M)),
        lambda: sequential(nn.ReLU()).requires_grad_(True).append(nn.LayerNorm(M)),
    ],
)
def test_Trap05_ExpertNotExactlyKnown_IsCalled(make: Any) -> None:
    assert isinstance(fused_form([make()]), str)


def test_Experts_OfDifferentFormOrDtype_AreCalled() -> None:
    assert fused_form([Plain(), sequential(nn.ReLU())]) == "the experts differ in structure"
    assert fused_form([Plain(), Plain().bfloat16()]) == "the experts' parameters differ in dtype or device"


@pytest.mark.parametrize("what", ["forward hook", "pre hook", "backward hook", "instance forward"])
def test_StillExact_TouchedLater_IsNoticed(what: str) -> None:
    assert still_exact([Plain(), Plain()])
    assert not still_exact([Plain(), touched(what)])


def test_StillExact_GlobalHook_IsNoticed() -> None:
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert not still_exact([Plain()])
    finally:
        handle.remove()
    assert still_exact([Plain()])


@pytest.mark.parametrize(
    "module, words",
    [
        (nn.BatchNorm1d(M), "mixes rows"),
        (nn.GroupNorm(1, M), "mixes rows"),
        (nn.LSTM(M, M), "mixes rows"),
        (nn.Conv2d(1, 1, 3), "mixes rows"),
        (nn.Dropout(0.1), "draws random numbers"),
        (nn.RReLU(), "draws random numbers"),
        (nn.Dropout(0.0), None),
        (nn.LayerNorm(M), None),
    ],
)
def test_Unsupported_RowsMixedOrDrawn_IsNamed(module: nn.Module, words: str | None) -> None:
    reason = unsupported_reason(nn.Sequential(nn.Linear(M, M), module))
    assert reason is None if words is None else words in (reason or "")
