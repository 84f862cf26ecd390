# SPDX-License-Identifier: Apache-2.0
"""Tests that the second of two calls of an experts module sees all changes between them."""

import gc
import os
import re
import threading
from collections.abc import Iterator
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
from sluice.errors import OverBudget, Unsupported
from tf_compare import check, rows
from torch.nn import functional as F

MODEL, HIDDEN, EXPERTS = 64, 32, 6  # transformers' grouped_mm, which calls any gate, needs multiples of 16 bytes
CLASS_OF = dict(tf_families.classes())


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    sluice.configure()


def make(kind: str = "mixtral") -> torch.nn.Module:
    return tf_families.make(kind, CLASS_OF[kind], MODEL, HIDDEN, EXPERTS)


def given(tokens: int = 20) -> tf_compare.Rows:
    return rows(MODEL, EXPERTS, tokens, 2)


def call(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    what = given()
    return module(what.tokens.to(dtype), what.ids, what.weights)


def as_grouped_mm(module: torch.nn.Module) -> None:
    with tf_compare.implementation(module, "grouped_mm"):
        stock = tf_compare.run(module, given(), torch.float32)
    gaps = tf_compare.run(module, given(), torch.float32).gaps(stock)
    assert max(gaps.values()) < 2e-5, gaps


# ---- options ----


def test_ConfigSection_WrittenOrChangedLater_IsReadAgain() -> None:
    module = make()
    for chunks in (1, 3, 2):
        if chunks > 1:
            module.config.sluice = getattr(module.config, "sluice", {})
            module.config.sluice["chunks"] = chunks
        check(module, given(50))
        assert sluice.stats(module)["contexts"][0]["last_num_chunks"] == chunks
    del module.config.sluice
    check(module, given(50))
    assert sluice.stats(module)["contexts"][0]["last_num_chunks"] == 1


def test_ConfigSection_WrongLater_IsRefusedByEveryCall() -> None:
    module = make()
    call(module)
    module.config.sluice = {"chnks": 2}
    for _ in range(2):
        with pytest.raises(ConfigError, match="chunks"):
            call(module)
    module.config.sluice = {"chunks": 2}
    check(module, given(50))
    assert sluice.stats(module)["contexts"][0]["last_num_chunks"] == 2


def test_Policy_Refused_IsRefusedByEveryCall() -> None:
    """Repeats a call that failed, as in a notebook whose cell runs twice."""
    sluice.configure(policy="S1")
    module = make("inkling2")
    for _ in range(2):
        with pytest.raises(Unsupported, match="policy S1"):
            call(module)


def test_Budget_OfAModelThatHasGone_IsTheNextOnesWhole() -> None:
    """A deeper model in the same process has as many outstanding forwards as layers."""
    sluice.configure(memory_budget=1 << 10, gemm="ref")
    with pytest.raises(OverBudget) as refused:
        tf_models.step(tf_models.make("mixtral", num_hidden_layers=8), tf_models.batch())
    needed = re.search(r" needs (\d+)\b", str(refused.value))
    assert needed is not None
    budget = int(int(needed[1]) * 1.2) + (64 << 10)
    sluice.configure(memory_budget=budget, gemm="ref")
    tf_models.step(tf_models.make("mixtral", num_hidden_layers=2), tf_models.batch())
    gc.collect()
    model = tf_models.make("mixtral", num_hidden_layers=8)
    found = tf_models.step(model, tf_models.batch())
    sluice.configure()
    wanted = tf_models.step(tf_models.make("mixtral", num_hidden_layers=8), tf_models.batch())
    assert max(tf_models.gaps(found, wanted).values()) < 2e-5
    assert 0 < sluice.stats(model.model.layers[-1].mlp.experts)["contexts"][0]["peak_bytes"] <= budget


# ---- gates ----


def test_Gate_ThatDropsInTrainingAlone_IsAskedInBothModes() -> None:
    module = make()

    def drops(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.dropout(F.silu(gate) * up, 0.5, training=module.training)

    module._apply_gate = drops
    whole = call(module.eval())
    assert sluice.stats(module)["layers"][0]["computed_by"] == "sluice"
    dropped = call(module.train())
    assert sluice.stats(module)["layers"][0]["computed_by"] == "the module's own functions"
    assert not torch.allclose(dropped, whole, rtol=0.1, atol=0.1)
    torch.testing.assert_close(call(module.eval()), whole)
    assert sluice.stats(module)["layers"][0]["computed_by"] == "sluice"


def scaled(module: torch.nn.Module) -> torch.nn.Module:
    """Makes the module's gate read an attribute of the module, which is 1 at first."""

    class Scaled(type(module)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, -1)
            return F.silu(self.scale * gate) * up

    module.__class__ = Scaled
    return module


def test_Gate_WithAParameter_TrainsIt() -> None:
    module = scaled(make())
    module.scale = torch.nn.Parameter(torch.ones(()))
    as_grouped_mm(module)
    assert module.scale.grad is not None and float(module.scale.grad) != 0
    with torch.no_grad():
        module.scale.fill_(1.5)
    as_grouped_mm(module)


def test_Gate_WithABuffer_SeesItChange() -> None:
    module = scaled(make())
    module.register_buffer("scale", torch.ones(()))
    as_grouped_mm(module)
    module.scale.fill_(1.5)
    as_grouped_mm(module)


def test_Gate_WithANumber_SeesItChange() -> None:
    module = scaled(make())
    module.scale = 1.0
    as_grouped_mm(module)
    assert sluice.stats(module)["layers"][0]["computed_by"] == "sluice"
    module.scale = 1.5
    as_grouped_mm(module)
    assert sluice.stats(module)["layers"][0]["computed_by"] == "the module's own functions"
    module.scale = 1.0
    as_grouped_mm(module)
    assert sluice.stats(module)["layers"][0]["computed_by"] == "sluice"


def test_Gate_WithALooseTensor_SeesItChange() -> None:
    module = scaled(make())
    module.scale = torch.ones(())
    as_grouped_mm(module)
    module.scale.fill_(1.5)
    as_grouped_mm(module)


def test_Activation_WithANumber_SeesItChange() -> None:
    class Scaled(torch.nn.Module):
        scale = 1.0

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return F.silu(self.scale * rows)

    module = make()
    module.act_fn = Scaled()
    as_grouped_mm(module)
    assert sluice.stats(module)["layers"][0]["computed_by"] == "sluice"
    module.act_fn.scale = 1.5
    as_grouped_mm(module)


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


@pytest.mark.usefixtures("one_gemm")
def test_StateDict_Assigned_IsReadAgain() -> None:
    module, other = make(), make()
    with torch.no_grad():
        before = call(module)
        for parameter in other.parameters():
            parameter.mul_(1.5)
        wanted = call(other)
        module.load_state_dict(other.state_dict(), assign=True)
        found = call(module)
    assert torch.equal(found, wanted) and not torch.equal(found, before)


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
