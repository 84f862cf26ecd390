# SPDX-License-Identifier: Apache-2.0
"""Tests that unsupported models are rejected with class, attribute and remedy, and wrong options with the key."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sluice
import tf_compare
import tf_families
import tf_models
import torch
from sluice.config import ConfigError
from sluice.errors import InvalidArgument, Unsupported
from tf_compare import Rows, check, rows
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode


def make(kind: str = "mixtral") -> torch.nn.Module:
    return tf_families.make(kind, 16, 8, 4)


def run(module: torch.nn.Module, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    given = rows(16, 4, 5, 2)
    return module(given.tokens.to(dtype), given.ids, given.weights)


@pytest.mark.parametrize("wanted", [True, False])
def test_Ids_OutsideOfTheExperts_AreRefusedAsByEager(wanted: bool) -> None:
    """transformers marks a dropped route by the number of experts; other ids outside of the range are rejected."""
    module, given = make(), rows(16, 4, 5, 2)
    eager = make()
    eager.config._experts_implementation = "eager"
    eager.load_state_dict(module.state_dict())
    with torch.set_grad_enabled(wanted):
        for _ in range(2):  # without gradients, the second call takes the fast path
            assert torch.allclose(
                module(given.tokens, given.ids, given.weights), eager(given.tokens, given.ids, given.weights), atol=1e-5
            )
            for bad in (-1, 5, 1000):
                ids = given.ids.clone()
                ids[2, 1] = bad
                with pytest.raises(RuntimeError, match="Class values must be"):
                    eager(given.tokens, ids, given.weights)
                said = rf"MixtralExperts: top_k_index\[2, 1\] is {bad}; ids lie in \[0, 4\), or 4 for a route"
                with pytest.raises(InvalidArgument, match=said):
                    module(given.tokens, ids, given.weights)
            ids[2, 1] = 4
            found = module(given.tokens, ids, given.weights)
            assert torch.allclose(found, eager(given.tokens, ids, given.weights), atol=1e-5)


def _short(module: torch.nn.Module) -> None:
    module.down_proj.data = module.down_proj.data.bfloat16()


def _other_shape(module: torch.nn.Module) -> None:
    module.gate_up_proj = torch.nn.Parameter(torch.randn(4, 12, 16))


MODULES: dict[str, tuple[Callable[[torch.nn.Module], Any], type[Exception], tuple[str, ...]]] = {
    "float64": (lambda module: module.double(), Unsupported, ("gate_up_proj", "float64", "dtype=torch.float32")),
    "two dtypes": (_short, Unsupported, ("down_proj", "bfloat16", "float32")),
    "elsewhere": (lambda module: module.to("meta"), Unsupported, ("gate_up_proj", "meta", "move the model")),
    "other shape": (
        _other_shape,
        InvalidArgument,
        ("gate_up_proj has shape [4, 12, 16]", "[4, 16, 16]", "is_transposed=False"),
    ),
    "no flag": (lambda module: delattr(module, "is_transposed"), Unsupported, ("is_transposed",)),
    "no parameter": (lambda module: delattr(module, "down_proj"), Unsupported, ("down_proj", "absent")),
}


@pytest.mark.parametrize("case", MODULES)
def test_Module_ThatCannotRun_IsRefusedByName(case: str) -> None:
    change, kind, words = MODULES[case]
    module = make()
    change(module)
    with pytest.raises(kind) as caught:
        run(module, torch.float64 if case == "float64" else torch.float32)
    for word in ("MixtralExperts", 'experts_implementation="eager"', *words):
        assert word in str(caught.value), caught.value


def test_Rows_ThatDoNotFit_AreRefusedByName() -> None:
    module, given = make(), rows(16, 4, 5, 2)
    for tokens, weights, kind, words in (
        (given.tokens.to("meta"), given.weights, Unsupported, "hidden_states is on meta"),
        (given.tokens[:, :12], given.weights, InvalidArgument, r"hidden_states has shape \[5, 12\]"),
        (given.tokens, given.weights[:, :1], InvalidArgument, "top_k_index has shape"),
    ):
        with pytest.raises(kind, match=f"MixtralExperts: {words}"):
            module(tokens, given.ids, weights)


def test_Configure_EachSource_ReachesTheLayer(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunks_of(module: torch.nn.Module) -> int:
        check(module, rows(16, 4, 50, 2))
        return int(sluice.stats(module)["contexts"][0]["last_num_chunks"])

    module = make()
    for chunks in (1, 3):
        sluice.configure(chunks=chunks)
        assert chunks_of(module) == chunks
    module.config.sluice = {"chunks": 2, "wgrad_mode": "per_chunk"}
    assert chunks_of(module) == 3
    sluice.configure()
    assert chunks_of(module) == 2
    monkeypatch.setenv("SLUICE_OPTIONS", '{"chunks": 4}')
    assert chunks_of(make()) == 4
    module = make()
    module.config.sluice = {"chnks": 2}
    with pytest.raises(ConfigError, match="chunks"):
        run(module)


@pytest.mark.parametrize("spare", [1.02, 1.2, 1.4, 1.6, 1.8, 2.0, 2.4])
def test_MemoryBudget_JustAboveTheLeast_IsSharedByTheLayersToCome(spare: float) -> None:
    """The first layer's plan leaves memory for the steps of layers that do not exist yet."""
    budget = tf_models.budget(num_layers=6, spare=spare)
    sluice.configure(memory_budget=budget, gemm="ref")
    model = tf_models.make("mixtral", num_hidden_layers=6)
    found = tf_models.step(model, tf_models.batch())
    sluice.configure()
    wanted = tf_models.step(tf_models.make("mixtral", num_hidden_layers=6), tf_models.batch())
    assert max(tf_compare.gaps(found, wanted).values()) < 2e-5
    experts = tf_models.experts_of(model)
    assert len(experts) == 6
    assert all(0 < sluice.stats(module)["contexts"][0]["peak_bytes"] <= budget for module in experts)


def test_SwitchedOff_TransformersComputes(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sluice.adapters.transformers.experts._announced", set())  # each kind once in a process
    module = make()
    sluice.configure(enabled=False)
    check(module, rows(16, 4, 50, 2))
    assert "off" in capfd.readouterr().out
    assert sluice.stats(module)["layers"][0]["computed_by"] == "transformers"


def test_Registration_ByEntryPointAndByImport_NeitherImportsTheHost() -> None:
    code = """
import sys, torch
assert "transformers" not in sys.modules
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.distributed.expert_parallel import EPImplementationInterface
assert "sluice" in ALL_EXPERTS_FUNCTIONS and "sluice" in EPImplementationInterface()
assert "sluice.adapters.transformers.experts" not in sys.modules
assert "sluice.adapters.transformers.transport" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=140)
    code = """
import os, sys
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
assert "sluice" not in ALL_EXPERTS_FUNCTIONS
from transformers.distributed.expert_parallel import EPImplementationInterface
assert "sluice" not in EPImplementationInterface()
import sluice
assert "sluice" in ALL_EXPERTS_FUNCTIONS and "sluice" in EPImplementationInterface()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=140)


def test_Doctor_SaysThatItIsRegistered() -> None:
    from sluice import doctor

    found = {finding.check: finding for finding in doctor.examine()}
    assert found["transformers"].state == doctor.OK, found["transformers"]


def _forward_mode(call: Any, tokens: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        call(torch.autograd.forward_ad.make_dual(tokens, tokens))


def _fake(call: Any, tokens: torch.Tensor) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        call(mode.from_tensor(tokens))


class _OfTokens(torch.nn.Module):
    """Calls experts with fixed routes."""

    def __init__(self, module: torch.nn.Module, given: Rows) -> None:
        super().__init__()
        self.module, self.given = module, given

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.module(tokens, self.given.ids, self.given.weights)


# What cannot see inside of a call, and words of the error.
WATCHERS: dict[str, tuple[Callable[[Any, torch.Tensor], Any], str]] = {
    "vmap": (lambda call, tokens: torch.func.vmap(call)(tokens[None]), "torch.func"),
    "grad": (lambda call, tokens: torch.func.grad(lambda x: call(x).sum())(tokens), "torch.func"),
    "forward mode": (_forward_mode, "forward-mode"),
    "make_fx": (lambda call, tokens: make_fx(call)(tokens), "make_fx"),
    "make_fx, early": (lambda call, tokens: make_fx(call, pre_dispatch=True)(tokens), "make_fx"),
    "export": (lambda call, tokens: torch.export.export(call, (tokens,)), ""),
    "trace": (lambda call, tokens: torch.jit.trace(call, tokens), "torch.jit.trace"),
    "fake tensors": (_fake, "FakeTensorMode"),
}


@pytest.mark.usefixtures("one_gemm")
@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("watcher", WATCHERS)
def test_Watchers_ThatCannotSeeInside_AreRefused(watcher: str, grad: bool) -> None:
    """Otherwise a graph would silently lack the experts, and forward-mode tangents would be lost."""
    module, given, (watch, said) = make(), rows(16, 4, 5, 2), WATCHERS[watcher]
    module.requires_grad_(watcher != "trace")
    with torch.set_grad_enabled(grad):
        wanted = run(module)
        with pytest.raises(Unsupported) as caught:
            watch(_OfTokens(module, given), given.tokens)
        for word in ("MixtralExperts", 'experts_implementation="batched_mm"', said):
            assert word in str(caught.value), caught.value
        with FlopCounterMode(display=False):  # a mode that observes and changes nothing is allowed
            assert torch.equal(run(module), wanted)


def test_Compile_BreaksTheGraphAndSaysSo() -> None:
    code = """
import os
os.environ.pop("TORCHDYNAMO_DISABLE", None)
import torch, torch._dynamo, tf_families, tf_compare
module = tf_families.make("mixtral", 16, 8, 4)
given = tf_compare.rows(16, 4, 5, 2)
wanted = module(given.tokens, given.ids, given.weights)
call = lambda x: module(x * 2, given.ids, given.weights) + 1
found = torch.compile(call, backend="eager")(given.tokens / 2)
torch.testing.assert_close(found, wanted + 1)
try:
    torch._dynamo.reset()
    torch.compile(call, backend="eager", fullgraph=True)(given.tokens / 2)
except Exception as error:
    assert "Sluice" in str(error) and "graph break" in str(error), error
else:
    raise AssertionError("no error")
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environment.pop("TORCHDYNAMO_DISABLE", None)
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
