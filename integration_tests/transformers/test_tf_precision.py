# SPDX-License-Identifier: Apache-2.0
"""Tests experts whose own loop computes in f32 inside a 16-bit model, or adds f32 biases under autocast."""

from __future__ import annotations

from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import torch
from sluice.adapters.transformers import contract as contracts
from sluice.adapters.transformers import experts as experts_module
from sluice.adapters.transformers import precision
from tf_compare import rows

MODEL, HIDDEN, EXPERTS = 37, 29, 6
SHORTS = [torch.bfloat16, torch.float16]
# Half a unit in the last place of 8 and of 11 bits, relative to the value: the error of an output that is rounded once.
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
PRIVACY = "openai_privacy_filter"


def make(kind: str, dtype: torch.dtype = torch.float32, biases: float = 1.0) -> torch.nn.Module:
    module = tf_families.make(kind, MODEL, HIDDEN, EXPERTS)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(biases)
    return module.to(dtype)


def exact(module: torch.nn.Module, cast: torch.dtype | None = None) -> bool:
    contract = contracts.read(module)
    tensors = [getattr(module, name) for name in contract.names]
    return precision.computes_in_f32(module, contract, tensors, cast)


@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *SHORTS], ids=str)
def test_Classes_OfTheRegistry_AreTakenForWhatTheyAre(dtype: torch.dtype, cast: torch.dtype | None) -> None:
    """The test covers every class. The adapter knows no class names: expected values come from the classes' sources."""
    found, biased = set(), set()
    for kind, name in tf_families.classes():
        module = tf_families.make(kind, 16, 8, 4, name).to(dtype)
        found |= {name} if exact(module, cast) else set()
        biased |= {name} if module.has_bias and module.is_transposed else set()  # added to a matmul, not by a Linear
    if cast is not None:
        # Biases of autocast's dtype are added in it, unless the loop converts them; other biases give a sum in f32.
        assert found == (biased if dtype != cast else {"OpenAIPrivacyFilterExperts"})
        assert {"OpenAIPrivacyFilterExperts", "GptOssExperts"} <= biased
    else:
        assert found == (set() if dtype == torch.float32 else {"OpenAIPrivacyFilterExperts"})


@pytest.mark.parametrize("dtype", SHORTS, ids=str)
def test_F32Loop_In16BitModel_NoFurtherFromF64ThanEager(dtype: torch.dtype) -> None:
    """The output and all gradients are compared. If the loop computed in 16 bits, gradients would be 4 to 8 % off."""
    module, given = make(PRIVACY, dtype), rows(MODEL, EXPERTS, 200, 2)
    wanted = tf_compare.reference(module, given, dtype)
    found = tf_compare.run(module, given, dtype)
    with tf_compare.implementation(module, "eager"):
        eager = tf_compare.gaps(tf_compare.run(module, given, dtype), wanted)
    for name, gap in tf_compare.gaps(found, wanted).items():
        assert found[name].dtype == (torch.float32 if name == "weights" else dtype), name
        assert gap <= ROUNDING[dtype] and gap <= max(1.2 * eager[name], 1e-5), (name, gap, eager[name])
    assert sluice.stats(module)["layers"][0]["computed_by"] == "sluice"


@pytest.mark.parametrize("kind", ["gpt_oss", PRIVACY])
@pytest.mark.parametrize("dtype", SHORTS, ids=str)
def test_Biases_UnderAutocast_NoFurtherFromF64ThanEager(kind: str, dtype: torch.dtype) -> None:
    """Biases are a hundred times as large as usual: eager adds them in f32."""
    module, given = make(kind, biases=100.0), rows(MODEL, EXPERTS, 200, 2)
    wanted = tf_compare.reference(module, given, torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        found = tf_compare.gaps(tf_compare.run(module, given, torch.float32), wanted)
        with tf_compare.implementation(module, "eager"):
            eager = tf_compare.gaps(tf_compare.run(module, given, torch.float32), wanted)
    for name, gap in found.items():
        assert gap <= max(1.2 * eager[name], 2e-5), (name, gap, eager[name])


@pytest.mark.parametrize("dtype", SHORTS, ids=str)
def test_F32Loop_WithAGateThatIsCalled_IsF32AroundIt(dtype: torch.dtype) -> None:
    module, given = make(PRIVACY, dtype), rows(MODEL, EXPERTS, 200, 2)

    def softened(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.softplus(gate) * up

    module._apply_gate = softened
    wanted = tf_compare.reference(module, given, dtype)
    for name, gap in tf_compare.gaps(tf_compare.run(module, given, dtype), wanted).items():
        assert gap <= ROUNDING[dtype], (name, gap)
    assert sluice.stats(module)["layers"][0]["computed_by"] == "the module's own functions"


def test_Banner_SaysWhichComputeInF32(capfd: pytest.CaptureFixture[str]) -> None:
    given = rows(MODEL, EXPERTS, 5, 2)

    def said(module: torch.nn.Module, cast: bool) -> list[bool]:
        experts_module._announced.clear()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            module(given.tokens.to(module.down_proj.dtype), given.ids, given.weights)
        lines = [line for line in capfd.readouterr().out.splitlines() if "runs on Sluice" in line]
        return ["in float32 inside as its own loop" in line for line in lines]

    for kind, dtype, cast, wanted in (
        (PRIVACY, torch.float32, False, False),
        (PRIVACY, torch.bfloat16, False, True),
        ("gpt_oss", torch.bfloat16, False, False),
        ("mixtral", torch.float32, True, False),
    ):
        assert said(make(kind, dtype), cast) == [wanted]
    module = make("gpt_oss")
    assert said(module, False) + said(module, True) == [False, True]


class _Loop(torch.nn.Module):
    """Returns the result of transformers' decorator: a forward around the loop of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(3, 8, 4))
        self.down_proj = torch.nn.Parameter(torch.zeros(3, 4, 4))
        self.act_fn = torch.nn.SiLU()
        self.num_experts = 3
        self.has_gate = self.is_concatenated = True
        self.has_bias = self.is_transposed = False


def _decorated(loop: Any) -> type:
    def forward(self: Any, *args: Any) -> Any:
        raise AssertionError("the stand-in is called past the decorator")

    forward.__wrapped__ = loop  # type: ignore[attr-defined]
    gate = lambda self, x: self.act_fn(x[..., :4]) * x[..., 4:]  # noqa: E731
    return type("Loop", (_Loop,), {"forward": forward, "_apply_gate": gate})


def test_Loop_ThatFailsOnOneRow_OrHasHooks_IsNotTaken() -> None:
    def failing(self: Any, tokens: Any, ids: Any, weights: Any) -> Any:
        raise RuntimeError("takes no single row")

    def in_f32(self: Any, tokens: Any, ids: Any, weights: Any) -> Any:
        middle = self._apply_gate(tokens.float() @ self.gate_up_proj[0].float().t())
        return middle @ self.down_proj[0].float().t()

    assert not exact(_decorated(failing)().bfloat16())
    module = _decorated(in_f32)().bfloat16()
    with torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.float16):
        assert exact(module), "what is on around the call belongs to the host"
    hooked = _decorated(in_f32)().bfloat16()
    calls: list[Any] = []
    hooked.act_fn.register_forward_hook(lambda *seen: calls.append(seen))
    assert not exact(hooked) and not calls
