# SPDX-License-Identifier: Apache-2.0
"""Tests that the second of two calls of an experts module sees all changes between them."""

import gc
import os
import threading
from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import tf_models
import torch
from sluice.adapters.common import contexts
from sluice.adapters.transformers import experts as experts_module
from sluice.config import ConfigError
from sluice.errors import Unsupported
from tf_compare import check, rows
from torch.nn import functional as F

MODEL, HIDDEN, EXPERTS = 64, 32, 6  # transformers' grouped_mm, which calls any gate, needs multiples of 16 bytes


def make(kind: str = "mixtral") -> torch.nn.Module:
    return tf_families.make(kind, MODEL, HIDDEN, EXPERTS)


def given(tokens: int = 20) -> tf_compare.Rows:
    return rows(MODEL, EXPERTS, tokens, 2)


def call(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    what = given()
    return module(what.tokens.to(dtype), what.ids, what.weights)


def as_grouped_mm(module: torch.nn.Module) -> None:
    with tf_compare.implementation(module, "grouped_mm"):
        stock = tf_compare.run(module, given(), torch.float32)
    gaps = tf_compare.gaps(tf_compare.run(module, given(), torch.float32), stock)
    assert max(gaps.values()) < 2e-5, gaps


def computed_by(module: torch.nn.Module) -> str:
    return str(sluice.stats(module)["layers"][0]["computed_by"])


# ---- options ----


def test_ConfigSection_WrittenOrChangedLater_IsReadAgain() -> None:
    module = make()
    for chunks in (1, 3, 0, 2, 1):
        module.config.sluice = {"chunks": chunks} if chunks > 1 else {}
        if chunks == 0:
            module.config.sluice["chnks"] = 2
            for _ in range(2):
                with pytest.raises(ConfigError, match="chunks"):
                    call(module)
            continue
        check(module, given(50))
        assert sluice.stats(module)["contexts"][0]["last_num_chunks"] == chunks


def test_Budget_OfAModelThatHasGone_IsTheNextOnesWhole() -> None:
    """A deeper model in the same process has as many outstanding forwards as layers."""
    budget = tf_models.budget(num_layers=8, spare=1.2)
    sluice.configure(memory_budget=budget, gemm="ref")
    tf_models.step(tf_models.make("mixtral", num_hidden_layers=2), tf_models.batch())
    gc.collect()
    model = tf_models.make("mixtral", num_hidden_layers=8)
    found = tf_models.step(model, tf_models.batch())
    sluice.configure()
    wanted = tf_models.step(tf_models.make("mixtral", num_hidden_layers=8), tf_models.batch())
    assert max(tf_compare.gaps(found, wanted).values()) < 2e-5
    assert 0 < sluice.stats(model.model.layers[-1].mlp.experts)["contexts"][0]["peak_bytes"] <= budget


# ---- gates ----


def test_Gate_ThatDropsInTrainingAlone_IsAskedInBothModes() -> None:
    module = make()

    def drops(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.dropout(F.silu(gate) * up, 0.5, training=module.training)

    module._apply_gate = drops
    whole = call(module.eval())
    assert computed_by(module) == "sluice"
    dropped = call(module.train())
    assert computed_by(module) == "the module's own functions"
    assert not torch.allclose(dropped, whole, rtol=0.1, atol=0.1)
    torch.testing.assert_close(call(module.eval()), whole)
    assert computed_by(module) == "sluice"


def scaled(module: torch.nn.Module) -> torch.nn.Module:
    """Makes the module's gate read an attribute of the module, which is 1 at first."""

    class Scaled(type(module)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, -1)
            return F.silu(self.scale * gate) * up

    module.__class__ = Scaled
    return module


SCALES: dict[str, Any] = {
    "parameter": lambda: torch.nn.Parameter(torch.ones(())),
    "buffer": lambda: torch.nn.Buffer(torch.ones(())),
    "loose tensor": lambda: torch.ones(()),
    "number": lambda: 1.0,
}


@pytest.mark.parametrize("kind", SCALES)
def test_Gate_WithWhatMayChange_SeesItChange(kind: str) -> None:
    """A parameter is trained, too. Only a gate of numbers can be one that C knows."""
    module = scaled(make())
    module.scale = SCALES[kind]()
    for value in (1.0, 1.5, 1.0):
        if kind == "number":
            module.scale = value
        else:
            with torch.no_grad():
                module.scale.fill_(value)
        as_grouped_mm(module)
        assert kind != "parameter" or float(module.scale.grad) != 0
        assert computed_by(module) == ("sluice" if (kind, value) == ("number", 1.0) else "the module's own functions")


class ScaledActivation(torch.nn.Module):
    scale = 1.0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return F.silu(self.scale * rows)


def test_Activation_ReplacedOrItsNumberChanged_IsReadAgain() -> None:
    module = make()
    for act_fn, by in (
        (ScaledActivation(), "sluice"),
        (torch.nn.Softplus(), "the module's own functions"),
        (torch.nn.GELU(), "sluice"),
    ):
        module.act_fn = act_fn
        as_grouped_mm(module)
        assert computed_by(module) == by
    module.act_fn = ScaledActivation()
    module.act_fn.scale = 1.5
    as_grouped_mm(module)


def test_Gate_OfNobodysKnowledge_IsCalledAndNotGuessed() -> None:
    module = make()

    def late_clamp(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate.clamp(max=0.75)) * up

    module._apply_gate = late_clamp
    as_grouped_mm(module)
    assert computed_by(module) == "the module's own functions"


# ---- parameters ----


class Packed(torch.Tensor):
    """A mock of a quantised tensor: its shape and dtype do not determine its bytes."""


@pytest.mark.parametrize("grad", [True, False])
def test_Parameter_QuantisedAfterTheFirstCall_IsRefused(grad: bool) -> None:
    module = make()
    with torch.set_grad_enabled(grad):
        call(module)
        call(module)
        module._parameters["gate_up_proj"] = module.gate_up_proj.detach().as_subclass(Packed)
        for _ in range(2):
            with pytest.raises(Unsupported, match="MixtralExperts.gate_up_proj is a Packed"):
                call(module)


@pytest.mark.usefixtures("one_gemm")
def test_Dtype_OfTheModelChangedLater_IsReadAgain() -> None:
    module = make()
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float32):
        check(module, given(), dtype)
        with torch.no_grad():
            found = call(module, dtype)
        wanted = call(module, dtype).detach()
        assert found.dtype == dtype and torch.equal(found, wanted)


def test_Module_InferenceModeThenTraining_TrainsAsEager() -> None:
    module = make()
    with torch.inference_mode():
        call(module)
        call(module)
    check(module, given())


# ---- threads and processes ----


@pytest.mark.usefixtures("one_gemm")
def test_Threads_FirstCallsTogether_MakeOneLayerOnOneContext(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contexts, "_contexts", {})
    made: list[str] = []
    real, both = contexts.Context, threading.Barrier(2)

    def slowly(*arguments: Any) -> Any:
        made.append("context")
        try:
            both.wait(1)  # waits for the other thread, which must not arrive
        except threading.BrokenBarrierError:
            pass
        return real(*arguments)

    monkeypatch.setattr(contexts, "Context", slowly)
    module, found = make(), []

    def work() -> None:
        found.append(call(module).detach())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["context"] and len(found) == 2 and torch.equal(*found)
    assert len(experts_module._states[module]._layers) == 1


@pytest.mark.usefixtures("one_gemm")
def test_Fork_AfterCalls_BothGoOn() -> None:
    module = make()
    with torch.no_grad():
        wanted = call(module)
        call(module)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 0 if torch.allclose(call(module), wanted, rtol=1e-4, atol=1e-5) else 2
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert torch.equal(call(module), wanted)
    check(module, given())
