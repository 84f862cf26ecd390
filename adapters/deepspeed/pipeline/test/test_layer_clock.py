# SPDX-License-Identifier: Apache-2.0
"""Tests LayerClock with a simulated clock that only layers advance."""

import time
from typing import Any

import pytest
import torch
from sluice.adapters.deepspeed.pipeline import layer_clock
from sluice.adapters.deepspeed.pipeline.layer_clock import LayerClock, Took
from sluice.adapters.torch import model_blocks
from sluice.adapters.torch.model_blocks import Recomputed
from torch import nn

MILLI = 1e-3


class _Now:
    """The simulated clock."""

    seconds = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.seconds


class _Pass(torch.autograd.Function):
    """Advances the clock by given seconds in the forward and in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float, backward_seconds: float) -> torch.Tensor:
        _Now.seconds += seconds
        ctx.backward_seconds = backward_seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        _Now.seconds += ctx.backward_seconds
        return grad, None, None


class _Layer(nn.Module):
    def __init__(self, forward: float, backward: float, is_frozen: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4), requires_grad=not is_frozen)
        self.seconds = forward * MILLI, backward * MILLI

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(_Pass.apply(x * self.scale, *self.seconds))


class _Stage:
    """A stage with the attributes of the host's module."""

    def __init__(self, first: int, layers: list[Any]) -> None:
        self._local_start, self.forward_funcs = first, layers

    def forward(self, x: Any) -> Any:
        for layer in self.forward_funcs:
            x = layer(x)
        return x


@pytest.fixture(autouse=True)
def _virtual(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layer_clock, model_blocks):
        monkeypatch.setattr(module, "time", _Now)


def _run(clock: LayerClock, stage: _Stage, micro_batches: int, wants_grad: bool = True, later: float = 0.0) -> None:
    clock.begin()
    outputs = []
    for micro_batch in range(micro_batches):
        with clock.forward(stage, micro_batch):
            outputs.append(stage.forward(torch.ones(2, 4, requires_grad=wants_grad)))
    for micro_batch, output in enumerate(outputs):
        with clock.backward(stage, micro_batch):
            output.sum().backward()
        if later:
            with clock.weight_grad(micro_batch):
                _Now.seconds += later


def _near(took: dict[int, Took], wanted: dict[int, tuple[float, float, float]]) -> None:
    assert took.keys() == wanted.keys()
    for layer, seconds in wanted.items():
        assert took[layer][:3] == pytest.approx([value * MILLI for value in seconds], abs=1e-12), layer
        assert took[layer].output == 32


def test_Took_BackwardsOfAnyRatio_AreThose() -> None:
    stage = _Stage(3, [_Layer(1, 1), _Layer(2, 8), _Layer(1, 0), _Layer(3, 6)])
    clock = LayerClock(range(3, 7))
    _run(clock, stage, 4)
    _near(clock.took(), {3: (1, 1, 0), 4: (2, 8, 0), 5: (1, 0, 0), 6: (3, 6, 0)})
    assert all(isinstance(layer, _Layer) for layer in stage.forward_funcs)


def test_Took_FrozenLayersInFront_TakeNoBackward() -> None:
    stage = _Stage(0, [_Layer(1, 2, is_frozen=True), _Layer(1, 2, is_frozen=True), _Layer(1, 3), _Layer(1, 2, True)])
    clock = LayerClock(range(4))
    _run(clock, stage, 4, wants_grad=False)
    _near(clock.took(), {0: (1, 0, 0), 1: (1, 0, 0), 2: (1, 3, 0), 3: (1, 2, 0)})


def test_Took_LayersThatRunAgain_AreSaidApart() -> None:
    layers = [_Layer(1, 2), _Layer(2, 3), _Layer(1, 2)]
    switched = Recomputed(layers[1:2])
    clock = LayerClock(range(3))
    _run(clock, _Stage(0, list(layers)), 4)
    _near(clock.took(), {0: (1, 2, 0), 1: (2, 5, 2), 2: (1, 2, 0)})
    switched.undo()
    assert model_blocks.on_recompute is None


def test_Took_WeightGradientsOfTheirOwn_AreShared() -> None:
    clock = LayerClock(range(2))
    _run(clock, _Stage(0, [_Layer(1, 1), _Layer(1, 3)]), 4, later=4 * MILLI)
    _near(clock.took(), {0: (1, 2, 0), 1: (1, 6, 0)})


def test_Took_ALayerThatHandsItsInputOn_TakesNothing() -> None:
    clock = LayerClock(range(3))
    _run(clock, _Stage(0, [_Layer(1, 2), lambda x: x, _Layer(1, 4)]), 4)
    _near(clock.took(), {0: (1, 2, 0), 1: (0, 0, 0), 2: (1, 4, 0)})


def test_Took_BatchThatIsNotMeasured_IsThatOfTheOneBefore() -> None:
    layer = _Layer(1, 2)
    clock = LayerClock([0])
    assert clock.took() == {}
    _run(clock, _Stage(0, [layer]), 1)
    assert clock.took() == {}  # the very first micro-batch is not measured
    _run(clock, _Stage(0, [layer]), 3)
    layer.seconds = 5 * MILLI, 5 * MILLI
    _run(clock, _Stage(0, [layer]), 1)
    _near(clock.took(), {0: (1, 2, 0)})
    _run(clock, _Stage(0, [layer]), 4)
    _near(clock.took(), {0: (5, 5, 0)})


@pytest.mark.parametrize(("milliseconds", "every"), [(10.0, 4), (0.1, 32), (1e-3, 4096)])
def test_Marks_OfShortLayers_AreFewer(milliseconds: float, every: int) -> None:
    """A layer has three marks of ten microseconds, which must take less than 1 % of the time."""
    clock = LayerClock(range(2))
    stage = _Stage(0, [_Layer(milliseconds / 2, milliseconds / 2)] * 2)
    _run(clock, stage, 4)
    clock.begin()
    assert clock.every == every
    for layer in stage.forward_funcs:
        layer.seconds = MILLI, MILLI
    _run(clock, stage, 4096)
    clock.begin()
    assert clock.every == 4


def test_Marks_OfALayer_CostWhatIsCounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures with the real clock, and takes the least of some tries."""
    monkeypatch.setattr(layer_clock, "time", time)
    monkeypatch.setattr(layer_clock, "_FIRST_EVERY", 1)
    layers = 50

    def least(is_measured: bool) -> float:
        found = []
        for _ in range(15):
            clock = LayerClock(range(layers) if is_measured else [layers])
            stage = _Stage(0, [nn.Tanh()] * layers)
            begun = time.thread_time()
            _run(clock, stage, 4)
            found.append((time.thread_time() - begun) / layers)
        return min(found)

    took = (least(True) - least(False)) / 4
    assert 0 < took <= 3 * layer_clock._MARK_S
